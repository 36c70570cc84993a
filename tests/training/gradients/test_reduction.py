"""Averaging of gradients: which reducer has which parameters, and which backwards communicate."""

from __future__ import annotations

import pytest
import torch
from pretended import pretended_rank
from torch.nn import Parameter

from unitrain.training.gradients.reduction import Reduction


def reduction(world_size: int = 2) -> Reduction:
    """Return that of a rank whose backend leaves gradients to the core, and fails where anything communicates."""
    rank = pretended_rank(0, world_size)
    return Reduction(rank.communicator, rank.communicator._backend, rank.config)


def test_each_parameter_is_watched_once() -> None:
    made = reduction()
    first, second, third = (Parameter(torch.ones(1)) for _ in range(3))
    [of_two] = made.finishers([first, second])
    assert made.finishers([second]) == [of_two]
    both = made.finishers([third, first])
    assert len(both) == 2
    assert of_two in both


def test_only_an_armed_backward_communicates() -> None:
    made = reduction()
    weight = Parameter(torch.ones(1))
    made.finishers([weight])
    made.arm(False)
    weight.sum().backward()  # type: ignore[no-untyped-call]
    assert not made.armed
    made.arm(True)
    with pytest.raises(AssertionError, match=r"gradients\.0\.0 communicates"):
        weight.sum().backward()  # type: ignore[no-untyped-call]
    made.close()
    weight.sum().backward()  # type: ignore[no-untyped-call]


def test_alone_every_backward_is_armed() -> None:
    made = reduction(world_size=1)
    made.arm(False)
    assert made.armed
