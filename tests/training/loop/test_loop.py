"""What loaders report to the training loop: batches for training, and no others."""

from __future__ import annotations

import pytest
import torch
from pretended import in_training
from torch import nn

import unitrain


@pytest.mark.parametrize("how", ["evaluation", "no_grad"])
def test_an_evaluation_within_an_epoch_is_not_what_is_trained_on(how: str) -> None:
    with unitrain.init(backend="single", device="cpu") as strategy:
        model = nn.Linear(1, 1)
        train, test = strategy.dataloader(range(8), batch_size=4), strategy.dataloader(range(3), batch_size=1)
        for _ in train:
            before = in_training(train)
            with strategy.evaluation(model) if how == "evaluation" else torch.no_grad():
                assert len(list(test)) == 3
            assert in_training(train) is before
