"""Averaging of gradients: which reducer has which parameters, and which backwards communicate."""

from __future__ import annotations

import torch
from pretended import pretended_rank
from torch.nn import Parameter

from unitrain.training.loop.averaging import GradientAveraging


def averaging() -> GradientAveraging:
    """Return that of a rank whose backend leaves gradients to the core, and fails where anything communicates."""
    rank = pretended_rank(0, 2)
    return GradientAveraging(rank.communicator, rank.communicator.collectives._backend, rank.config)


def test_each_parameter_is_watched_once() -> None:
    made = averaging()
    first, second, third = (Parameter(torch.ones(1)) for _ in range(3))
    [of_two] = made.finishers([first, second])
    assert made.finishers([second]) == [of_two]
    both = made.finishers([third, first])
    assert len(both) == 2
    assert of_two in both
