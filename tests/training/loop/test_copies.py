"""A warning for ranks that train on the same samples, since their script does not shard them."""

from __future__ import annotations

import warnings

import torch
from ranks import run_ranks
from torch import nn, ones

import unitrain


def train_on(own_share: bool) -> list[str]:
    """Train on the same samples on all ranks, but for the first step, or on other ones, but for the first."""
    with unitrain.init(backend="ddp") as strategy, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = nn.Linear(2, 1)
        model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(5):
            strategy.step(model(ones(1, 2) + step * (strategy.rank if own_share else 1)).sum(), optimizer)
        return [f"{one.filename}: {one.message}" for one in seen]


def test_ranks_that_train_on_the_same_samples_are_warned_of() -> None:
    first, other = run_ranks(train_on, False)
    assert len(first) == 1
    assert first[0].startswith(f"{__file__}: the first 3 losses are equal on all 2 ranks")
    assert other == []
    assert run_ranks(train_on, True) == [[], []]
