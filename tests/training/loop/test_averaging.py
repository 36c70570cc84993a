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


def test_parameters_are_watched_with_those_that_are_always_trained_together() -> None:
    made = averaging()
    first, second, third = (Parameter(torch.ones(1)) for _ in range(3))
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    made.registered(optimizer)
    made.watched(optimizer, [first, second])
    [of_two] = made.finishers([second, first])
    [of_second] = made.finishers([second])
    of_first, of_third = made.finishers([first, third])
    assert len({of_two, of_first, of_second, of_third}) == 4
    assert made.finishers([first, second, third]) == [of_first, of_second, of_third]


def test_a_parameter_that_no_optimizer_trains_any_more_is_not_watched() -> None:
    made = averaging()
    first, second = (Parameter(torch.ones(1)) for _ in range(2))
    [of_two] = made.finishers([first, second])
    [of_second] = made.finishers([second])
    assert (made._finishers, of_two in made._reducers) == ({second: of_second}, False)
