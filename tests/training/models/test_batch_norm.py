"""Running statistics of BatchNorm layers that are not synchronised."""

from __future__ import annotations

import torch
from torch import nn

from unitrain.data.loop import CurrentBatch
from unitrain.training.models import batch_norm


class Everywhere(batch_norm.GlobalBatchNorm):
    """A layer of a feature, with statistics over all ranks."""

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002  (torch's name)
        """Accept any input."""


def test_stand_ins_count_in_no_layer_that_is_not_synchronised() -> None:
    current_batch = CurrentBatch()
    plain, everywhere = nn.BatchNorm1d(2), Everywhere(2)
    model = nn.Sequential(plain, everywhere)
    for _ in range(2):
        batch_norm.ignore_stand_ins([model], current_batch)
    current_batch.is_stand_in = True
    model(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
    assert plain.num_batches_tracked == 0
    assert everywhere.num_batches_tracked == 1, "it leaves stand-ins out itself"
    assert plain.training
    current_batch.is_stand_in = False
    model(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
    assert plain.num_batches_tracked == 1
    assert len(plain._forward_hooks) == 1
