"""Direct calls of ``optimizer.step()`` are errors for prepared parameters, and for no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD

from unitrain import UsageError
from unitrain.training.loop.checks import DirectStepCheck

PREPARED, OTHER = Parameter(torch.ones(1)), Parameter(torch.ones(1))


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
