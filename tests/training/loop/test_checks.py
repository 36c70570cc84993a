"""A warning for ranks that train on the same samples, and errors for ``optimizer.step()`` on prepared parameters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from ranks import run_ranks
from torch import nn, ones
from torch.nn import Parameter
from torch.optim import SGD

import unitrain
from unitrain import UsageError
from unitrain.training.loop.checks import DirectStepCheck

PREPARED, OTHER = Parameter(torch.ones(1)), Parameter(torch.ones(1))


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


@pytest.fixture
def steps() -> Iterator[DirectStepCheck]:
    made = DirectStepCheck(lambda parameter: parameter is PREPARED)
    yield made
    made.close()


def test_only_the_strategy_steps_what_is_prepared(steps: DirectStepCheck) -> None:
    optimizer = SGD([{"params": [OTHER]}, {"params": [PREPARED]}], lr=0.1)
    with pytest.raises(
        UsageError,
        match=r"optimizer\.step\(\) was called for a prepared model.*call these instead of loss\.backward\(\)",
    ):
        optimizer.step()
    steps.allowed = True
    optimizer.step()
    steps.allowed = False
    with pytest.raises(UsageError, match=r"optimizer\.step\(\) was called for a prepared model"):
        optimizer.step()


def test_other_optimizers_are_let_be(steps: DirectStepCheck) -> None:
    optimizer = SGD([OTHER], lr=0.1)
    for _ in range(2):
        optimizer.step()


def test_closed_it_lets_every_optimizer_step() -> None:
    DirectStepCheck(lambda parameter: True).close()
    SGD([PREPARED], lr=0.1).step()
