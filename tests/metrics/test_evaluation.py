"""An evaluation's sums are those of one process, whatever the number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from needs import HOROVOD
from ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import unitrain


def evaluate() -> tuple[int, int]:
    strategy = unitrain.init(timeout_s=60)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1001, 8, generator=generator)
    model = strategy.prepare(nn.Linear(8, 5))
    correct = strategy.meter()
    loader = strategy.dataloader(TensorDataset(inputs, torch.arange(1001) % 5), global_batch_size=64)
    with strategy.evaluation(model):
        for pictures, labels in loader:
            correct.add(total=(model(pictures).argmax(1) == labels).sum(), count=len(labels))
    return correct.count(), int(correct.sum())


@pytest.mark.parametrize(
    ("world_size", "launcher"),
    [
        (2, "spawn"),
        *(pytest.param(n, "spawn", marks=pytest.mark.all("more ranks")) for n in (3, 8)),
        pytest.param(3, "horovodrun", marks=HOROVOD),
    ],
)
def test_an_evaluation_counts_every_sample_once(world_size: int, launcher: Any) -> None:
    """1001 samples can't be dealt out evenly to 2, 3 or 8 ranks, nor their last batch of 41 to 8."""
    (alone,) = run_ranks(evaluate, nprocs=1)
    assert alone[0] == 1001
    assert 0 < alone[1] < 1001
    assert run_ranks(evaluate, nprocs=world_size, launcher=launcher) == [alone] * world_size
