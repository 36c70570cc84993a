"""``backward`` with several losses and several optimizers, and with weight 0."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from plain_loop import model_of, sgd, strategy_of

from unitrain import UsageError
from unitrain.testing.models import Twins, step_by_hand


def test_weights_of_zero_leave_the_batch_out_whatever_its_loss() -> None:
    with strategy_of(accumulate=2) as strategy:
        twins = Twins(strategy)
        strategy.step(twins.loss(), twins.optimizer, weight=5)
        masked = (twins.loss() * 0) / torch.zeros(())  # the mean over no tokens: its gradient is NaN, too
        assert strategy.step(masked, twins.optimizer, weight=0).stepped
        step_by_hand(twins.loss_by_hand(), twins.by_hand)
        twins.assert_same()


def test_two_losses_of_one_optimizer_in_each_micro_batch() -> None:
    with strategy_of(accumulate=2) as strategy:
        twins = Twins(strategy)
        total = torch.zeros(())
        for scale in (1.0, 3.0):
            strategy.backward(twins.loss(scale=scale), twins.optimizer)
            strategy.backward(twins.loss(scale=2 * scale), twins.optimizer)
            strategy.update(twins.optimizer)
            total = total + (twins.loss_by_hand(scale=scale) + twins.loss_by_hand(scale=2 * scale)) / 2
        step_by_hand(total, twins.by_hand)
        twins.assert_same()


def test_optimizer_met_first_in_step_gets_no_gradient_of_an_earlier_loss() -> None:
    """The generator's optimizer, never prepared, must not keep what the discriminator's backward left."""
    with strategy_of() as strategy:
        twins = Twins(strategy, partial(model_of, 2))
        other = strategy.prepare(model_of(1))
        strategy.step((other(twins.rows) * twins.prepared(twins.rows)).sum(), sgd(other))
        strategy.step(twins.loss(), sgd(twins.model))
        step_by_hand(twins.loss_by_hand(), twins.by_hand)
        twins.assert_same()


def test_backward_without_any_optimizer() -> None:
    with strategy_of() as strategy, pytest.raises(UsageError, match="none was prepared"):
        strategy.backward(torch.ones((), requires_grad=True))
