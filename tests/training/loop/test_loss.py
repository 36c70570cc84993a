"""The loss passed to a step: errors for wrong ones, and the loss scale of fp16."""

from __future__ import annotations

import math

import pytest
import torch
from plain_loop import Ready, model_of, ready, sgd, strategy_of, weights
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import unitrain
from unitrain import Stopped, UsageError

__all__ = ["ready"]  # the fixture


@pytest.mark.parametrize("joint", [True, False])
def test_fp16_scale_changes_between_windows_only(joint: bool) -> None:
    """Gradients that wait for their update were made with the scale of before."""
    strategy = unitrain.init(backend="single", precision="fp16")
    one, two = model_of(1).float(), model_of(2).float()
    first, second = SGD(one.parameters(), lr=0.1), SGD(two.parameters(), lr=0.1)
    strategy.prepare(one, two, first, second)
    x = torch.ones(1, 4)
    bad, good = one(x).float().mean() * 1e35, two(x).float().mean()
    if joint:
        strategy.backward(bad + good)
    else:
        strategy.backward(bad, first)
        strategy.backward(good, second)
    assert strategy.update(first).skipped
    assert strategy.update(second).stepped
    expected = model_of(2).float()
    with torch.autocast("cpu", torch.float16):
        expected(x).float().mean().backward()
    SGD(expected.parameters(), lr=0.1).step()
    torch.testing.assert_close(weights(two), weights(expected), rtol=1e-3, atol=1e-3)


def test_fp16_gradients_are_clipped_unscaled() -> None:
    strategy = unitrain.init(backend="single", precision="fp16", clip_norm=1e-3)
    model = model_of().float()
    before = weights(model)
    model, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=1.0))
    result = strategy.step(model(torch.ones(2, 4)).float().mean(), optimizer)
    assert result.grad_norm is not None
    assert 0.1 < result.grad_norm < 100
    assert (weights(model) - before).norm() == pytest.approx(1e-3, rel=1e-2)


def test_nan_at_the_smallest_scale_is_not_an_overflow() -> None:
    strategy = unitrain.init(backend="single", precision="fp16")
    model, optimizer = strategy.prepare(model := model_of().float(), SGD(model.parameters(), lr=0.1))
    with pytest.raises(Stopped):  # noqa: PT012
        for _ in range(50):
            strategy.step(model(torch.ones(1, 4)).sum() * math.nan, optimizer)


def test_loss_of_shape_1_is_a_scalar(ready: Ready) -> None:
    strategy, model, optimizer = ready
    strategy.step(model(torch.ones(2, 4, dtype=torch.float64)).sum().reshape(1), optimizer)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.first, x.requires_grad_(), use_reentrant=self.reentrant)
        out: Tensor = self.second(hidden)
        return out


def test_reentrant_checkpointing_with_several_optimizers_is_refused() -> None:
    """Its backward ignores ``inputs``: the layers within would get no gradients, without a word."""
    strategy = strategy_of(precision="fp32")
    for reentrant in (False, True):
        model, other = Checkpointed(reentrant), Checkpointed(reentrant)
        model, other, optimizer, _ = strategy.prepare(model, other, sgd(model), sgd(other))
        before = model.first.weight.detach().clone()
        loss = model(torch.ones(2, 2)).mean()
        if reentrant:
            with pytest.raises(UsageError, match="pass use_reentrant=False"):
                strategy.step(loss, optimizer)
        else:
            strategy.step(loss, optimizer)
        assert torch.equal(model.first.weight, before) == reentrant
