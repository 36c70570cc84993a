"""What loaders report to the training loop: batches for training, and no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pretended import in_training
from torch import nn
from torch.utils.data import TensorDataset

import unitrain
from unitrain import Strategy


@pytest.fixture
def strategy() -> Iterator[Strategy]:
    with unitrain.init(backend="single", device="cpu") as strategy:
        yield strategy


@pytest.mark.parametrize("how", ["evaluation", "no_grad"])
def test_an_evaluation_within_an_epoch_is_not_what_is_trained_on(strategy: Strategy, how: str) -> None:
    model = nn.Linear(1, 1)
    train = strategy.dataloader(TensorDataset(torch.ones(8, 1)), batch_size=4)
    test = strategy.dataloader(TensorDataset(torch.ones(3, 1)), batch_size=1)
    for _ in train:
        before = in_training(train)
        with strategy.evaluation(model) if how == "evaluation" else torch.no_grad():
            assert len(list(test)) == 3
        assert in_training(train) is before
