"""Large gradients are summed in the backward, and no non-finite number in them is missed, nor a finite one accused."""

from __future__ import annotations

import math

import pytest
import torch
from plain_loop import strategy_of
from torch import Tensor, nn
from torch.nn import Parameter

from unitrain import NonFiniteError
from unitrain.training.gradients.early_sums import EarlySums

LARGEST = torch.finfo(torch.float32).max


class Gives(torch.autograd.Function):
    """Has a given gradient."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return weight.sum()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *outer: Tensor) -> tuple[Tensor, None]:
        [gradient] = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient.clone(), None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = Parameter(torch.zeros(512, 512))
        self.small = Parameter(torch.zeros(3))

    def forward(self, large: Tensor) -> Tensor:
        return Gives.apply(self.large, large) + Gives.apply(self.small, torch.ones(3))  # type: ignore[no-any-return]


def gradient_of(number: float) -> Tensor:
    gradient = torch.zeros(512, 512)
    gradient[5, 7] = number
    return gradient


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_large_gradient_that_is_non_finite_stops_the_step(accumulate: int) -> None:
    with strategy_of(precision="fp32", accumulate=accumulate, on_nonfinite="raise") as strategy:
        net = Net()
        model, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
        for number in [1.0] * accumulate:
            strategy.step(model(gradient_of(number)), optimizer)
        for bad in (math.nan, math.inf, -math.inf):
            before = net.large.detach().clone()
            for _ in range(accumulate - 1):
                strategy.step(model(gradient_of(1.0)), optimizer)
            with pytest.raises(NonFiniteError, match="large"):
                strategy.step(model(gradient_of(bad)), optimizer)
            assert torch.equal(net.large, before)


def test_a_sum_that_overflows_accuses_no_gradient() -> None:
    with strategy_of(precision="fp32", on_nonfinite="raise") as strategy:
        net = Net()
        model, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-38))
        assert strategy.step(model(torch.full((512, 512), LARGEST)), optimizer).stepped
    assert net.large._post_accumulate_grad_hooks == {}, "a closed strategy leaves no hook"


def test_what_the_backward_has_summed_is_not_read_again_unless_it_has_changed() -> None:
    net, sums = Net(), EarlySums()
    sums.watch(net.parameters())

    def unknown() -> list[int]:
        found = [p.grad for p in net.parameters() if p.grad is not None]
        return [gradient.numel() for gradient in sums.without_finite(found)]

    net(gradient_of(1.0)).backward()
    assert unknown() == [3]
    assert unknown() == [512 * 512, 3], "a sum is of one backward"
    net(gradient_of(1.0)).backward()
    assert net.large.grad is not None
    net.large.grad.mul_(2)
    assert unknown() == [512 * 512, 3]
    net(gradient_of(1.0)).backward()
    net.large.grad = torch.zeros(512, 512)
    assert unknown() == [512 * 512, 3]
    net(gradient_of(math.inf)).backward()
    assert unknown() == [512 * 512, 3]
