"""``backward`` with several losses and several optimizers, and with weight 0."""

from __future__ import annotations

import copy

import pytest
import torch
from plain_loop import assert_equal, model_of, sgd, strategy_of, weights

from unitrain import UsageError


def test_weights_of_zero_leave_the_batch_out_whatever_its_loss() -> None:
    strategy = strategy_of(accumulate=2)
    model = model_of()
    expected = copy.deepcopy(model)
    model, optimizer = strategy.prepare(model, sgd(model))
    x = torch.randn(4, 4, dtype=torch.float64)
    strategy.step(model(x).pow(2).mean(), optimizer, weight=5)
    masked = (model(x).pow(2) * 0).sum() / torch.zeros(())  # the mean over no tokens: its gradient is NaN, too
    assert strategy.step(masked, optimizer, weight=0).stepped
    plain_optimizer = sgd(expected)
    expected(x).pow(2).mean().backward()
    plain_optimizer.step()
    assert_equal(model, expected)


def test_two_losses_of_one_optimizer() -> None:
    strategy = strategy_of(accumulate=2)
    model = model_of()
    expected = copy.deepcopy(model)
    model, optimizer = strategy.prepare(model, sgd(model))
    plain_optimizer = sgd(expected)
    x = torch.randn(4, 4, dtype=torch.float64)
    for rows in (x[:2], x[2:]):
        out = model(rows)
        strategy.backward(out.pow(2).mean(), optimizer)
        strategy.backward(model(2 * rows).abs().mean(), optimizer)
        strategy.update(optimizer)
    for rows in (x[:2], x[2:]):
        ((expected(rows).pow(2).mean() + expected(2 * rows).abs().mean()) / 2).backward()
    plain_optimizer.step()
    assert_equal(model, expected)


def test_one_loss_of_several_optimizers_leaves_a_third_alone() -> None:
    strategy = strategy_of()
    one, two, third = model_of(1), model_of(2), model_of(3)
    optimizers = [sgd(m) for m in (one, two, third)]
    strategy.prepare(one, two, third, *optimizers)
    before = weights(third)
    x = torch.randn(3, 4, dtype=torch.float64)
    result = strategy.step((one(x) + two(x) + third(x)).sum(), optimizers[:2])
    assert result.stepped
    assert all(p.grad is None for p in third.parameters())
    strategy.step(third(x).sum(), optimizers[2])
    expected = model_of(3)
    expected(x).sum().backward()
    sgd(expected).step()
    assert_equal(third, expected)
    assert not torch.equal(weights(third), before)


def test_optimizer_met_first_in_step_gets_no_gradient_of_an_earlier_loss() -> None:
    """The generator's optimizer, never prepared, must not keep what the discriminator's backward left."""
    strategy = strategy_of()
    one, two = model_of(1), model_of(2)
    strategy.prepare(one, two)
    x = torch.randn(3, 4, dtype=torch.float64)
    strategy.step((one(x) * two(x)).sum(), sgd(one))
    strategy.step(two(x).sum(), sgd(two))
    expected = model_of(2)
    expected(x).sum().backward()
    sgd(expected).step()
    assert_equal(two, expected)


def test_backward_without_any_optimizer() -> None:
    strategy = strategy_of()
    with pytest.raises(UsageError, match="none was prepared"):
        strategy.backward(torch.ones((), requires_grad=True))
