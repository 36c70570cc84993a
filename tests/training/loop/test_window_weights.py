"""The weights of losses: the gradient of a window is that of their weighted mean."""

from __future__ import annotations

import copy

import pytest
import torch
from plain_loop import Ready, assert_equal, model_of, ready, sgd, strategy_of

from unitrain import UsageError

__all__ = ["ready"]  # the fixture


def test_a_window_ended_early_without_a_loader_is_the_mean_of_what_it_held() -> None:
    strategy = strategy_of(accumulate=4)
    model = model_of()
    expected = copy.deepcopy(model)
    model, optimizer = strategy.prepare(model, sgd(model))
    x = torch.randn(6, 4, dtype=torch.float64)
    strategy.step(model(x[:2]).pow(2).mean(), optimizer)
    strategy.backward(model(x[2:]).pow(2).mean(), optimizer, sync=True)
    assert strategy.update(optimizer).stepped
    plain_optimizer = sgd(expected)
    (expected(x[:2]).pow(2).mean() / 2 + expected(x[2:]).pow(2).mean() / 2).backward()
    plain_optimizer.step()
    assert_equal(model, expected)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_weight_makes_the_gradient_that_of_the_weighted_mean(as_tensor: bool) -> None:
    strategy = strategy_of(accumulate=2)
    model = model_of()
    expected = copy.deepcopy(model)
    model, optimizer = strategy.prepare(model, sgd(model))
    x = torch.randn(6, 4, dtype=torch.float64)
    for rows, tokens in ((x[:2], 3), (x[2:], 7)):
        weight = torch.tensor(tokens) if as_tensor else tokens
        strategy.step(model(rows).pow(2).mean(), optimizer, weight=weight)
    plain_optimizer = sgd(expected)
    (expected(x[:2]).pow(2).mean() * 0.3 + expected(x[2:]).pow(2).mean() * 0.7).backward()
    plain_optimizer.step()
    assert_equal(model, expected)


def test_weights_of_a_window_are_all_or_none(ready: Ready) -> None:
    strategy, model, optimizer = ready
    strategy.step(model(torch.ones(2, 4)).sum(), optimizer, weight=3)
    with pytest.raises(UsageError, match="weight="):
        strategy.step(model(torch.ones(2, 4)).sum(), optimizer)
