"""Optimizers that share a model or its parameters, and layers that are frozen: as a plain loop on whole batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ranks import on_ranks, run_ranks
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

import unitrain
from unitrain import UsageError
from unitrain.testing.models import step_by_hand

STEPS, ROWS = 6, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk, self.one, self.two = nn.Linear(6, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor, heads: Sequence[str]) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        return torch.stack([getattr(self, head)(hidden) for head in heads])


class Ascent(Optimizer):
    """The first step of sharpness-aware minimisation: moves the weights along the gradient, until ``undo``."""

    def __init__(self, parameters: Any, rho: float) -> None:
        super().__init__(parameters, {"rho": rho})
        self.moved: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            norm = torch.nn.utils.get_total_norm([p.grad for p in trained])
            norm = getattr(norm, "full_tensor", lambda whole=norm: whole)()
            self.moved += [(p, p.clone()) for p in trained]
            for p in trained:
                p.add_(p.grad, alpha=group["rho"] / float(norm))

    @torch.no_grad()
    def undo(self) -> None:
        for p, before in self.moved:
            p.copy_(before)
        self.moved.clear()


class Plain:
    """A plain loop. Each optimizer steps with the gradients of the losses that it was given."""

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate
        self.losses: dict[Optimizer, list[dict[Parameter, Tensor | None]]] = {}

    def step(self, loss: Tensor, optimizers: Any) -> None:
        self.backward(loss, optimizers)
        self.update(optimizers)

    def backward(self, loss: Tensor, optimizers: Any) -> None:
        each = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
        trained = [p for o in each for group in o.param_groups for p in group["params"] if p.requires_grad]
        gradients = dict(zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True))
        for optimizer in each:
            self.losses.setdefault(optimizer, []).append(gradients)

    def update(self, optimizers: Any) -> None:
        for optimizer in [optimizers] if isinstance(optimizers, Optimizer) else optimizers:
            if len(kept := self.losses[optimizer]) == self.accumulate:
                for p in (p for group in optimizer.param_groups for p in group["params"]):
                    parts = [part for of_loss in kept if (part := of_loss.get(p)) is not None]
                    p.grad = sum(parts, torch.zeros_like(p)) / self.accumulate if parts else None
                optimizer.step()
                kept.clear()


def sgd(*modules: nn.Module) -> SGD:
    return SGD([p for module in modules for p in module.parameters()], lr=0.1, momentum=0.5, weight_decay=0.01)


def optimizers_of(case: str, net: Net) -> list[Optimizer]:
    if case == "sharpness":
        return [Ascent([*net.trunk.parameters(), *net.one.parameters()], rho=0.5), sgd(net.trunk, net.one)]
    if case in ("halves", "late"):
        return [sgd(net.trunk), sgd(net.one, net.two)]
    if case in ("frozen", "auxiliary"):
        return [sgd(net.trunk, net.one)]
    return [sgd(net.trunk, net.one), sgd(net.trunk, net.two)]


def train(case: str, model: Any, net: Any, optimizers: list[Any], on: Any, part: slice) -> None:
    step, backward, update = on.step, on.backward, on.update
    generator = torch.Generator().manual_seed(1)
    for i in range(STEPS):
        x, y = (torch.randn(ROWS, n, generator=generator, dtype=torch.float64)[part] for n in (6, 2))
        if case == "joint":
            step((model(x, ("one", "two")) - y).square().mean(), optimizers)
        elif case == "turns":
            step((model(x, ("one",)) - y).square().mean(), optimizers[0])
            step((model(x, ("two",)) - y).abs().mean(), optimizers[1])
        elif case == "halves":
            for optimizer in optimizers:
                step((model(x, ("one", "two")) - y).square().mean(), optimizer)
        elif case == "late":  # each optimizer has had its first backward before any of them steps
            for optimizer in optimizers:
                backward((model(x, ("one", "two")) - y).square().mean(), optimizer)
            for optimizer in optimizers:
                update(optimizer)
        elif case == "sharpness":
            for optimizer in optimizers:
                backward((model(x, ("one",)) - y).square().mean(), optimizer)
                if optimizer is optimizers[1]:
                    optimizers[0].undo()
                update(optimizer)
        else:
            net.trunk.requires_grad_(case == "auxiliary" or i in (0, 1, 4))
            step((model(x, ("one",)) - y).square().mean(), optimizers[0])


CASES = [(case, accumulate) for case in ("joint", "turns", "halves", "frozen", "auxiliary") for accumulate in (1, 2)]
CASES += [("sharpness", 1), ("late", 1)]


def expected(case: str, accumulate: int) -> Tensor:
    net = Net()
    optimizers = optimizers_of(case, net)
    train(case, net, net, optimizers, Plain(accumulate), slice(None))
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def compare(backend: str, settings: dict[str, Any]) -> list[str]:
    """Return the cases in which a world's weights are not those of the plain loop."""
    wrong = []
    for case, accumulate in CASES:
        if backend == "fsdp" and case == "frozen" and accumulate == 2:
            continue  # it is frozen within a window, which is refused
        strategy = unitrain.init(backend=backend, precision="fp64", device="cpu", accumulate=accumulate, **settings)
        net = Net()
        model, *optimizers = strategy.prepare(net, *optimizers_of(case, net))
        part = slice(strategy.rank, None, strategy.world_size)
        train(case, model, strategy.unwrap(model), optimizers, strategy, part)
        weights = torch.cat([strategy.full_tensor(p.detach()).reshape(-1) for p in strategy.unwrap(model).parameters()])
        off = float((weights - expected(case, accumulate)).abs().max())
        strategy.close()
        if off > 1e-12:
            wrong.append(f"{case} {accumulate}: {off:.1e}")
    return wrong


def test_each_optimizer_steps_with_the_gradients_of_its_losses() -> None:
    assert compare("single", {}) == []


@pytest.mark.parametrize(
    ("backend", "settings"),
    [
        ("ddp", {}),
        ("horovod", {}),
        ("fsdp", {"fsdp": {"find_unused_parameters": True}}),
        pytest.param("ddp", {"ddp": {"find_unused_parameters": True}}, marks=pytest.mark.all("the core's buckets")),
    ],
)
def test_each_optimizer_steps_with_the_gradients_of_its_losses_on_two_ranks(
    backend: str, settings: dict[str, Any]
) -> None:
    assert run_ranks(compare, backend, settings) == [[], []]


def test_a_window_with_losses_for_both_and_for_one_of_them_is_refused() -> None:
    strategy = unitrain.init(backend="single", precision="fp64", accumulate=2)
    net = Net()
    first, second = optimizers_of("joint", net)
    model, first, second = strategy.prepare(net, first, second)
    x = torch.ones(2, 6, dtype=torch.float64)
    strategy.step(model(x, ("one",)).sum(), first)
    with pytest.raises(UsageError, match=r"optimizer 0 and optimizer 1 share trunk\.weight, and some losses"):
        strategy.step(model(x, ("one", "two")).sum(), [first, second])


@pytest.mark.parametrize("calls", [True, False])
@on_ranks()
def test_a_rank_without_a_loss_of_the_model(calls: bool) -> None:
    """Rank 1 may call the model, or not; its loss has weight 0."""
    ddp = {"find_unused_parameters": True}
    with unitrain.init(backend="ddp", precision="fp64", device="cpu", ddp=ddp) as strategy:
        net, plain = Net(), Net()
        model, optimizer = strategy.prepare(net, sgd(net))
        reference = sgd(plain)
        for i in range(3):
            x = torch.full((2, 6), i + 1.0, dtype=torch.float64)
            loss = torch.zeros((), dtype=torch.float64, requires_grad=True)
            if strategy.is_main or calls:
                output = model(x, ("one",))
            if strategy.is_main:
                loss = output.square().mean()
            strategy.step(loss, optimizer, weight=1.0 - strategy.rank)
            step_by_hand(plain(x, ("one",)).square().mean(), reference)
        torch.testing.assert_close(net.state_dict(), plain.state_dict(), rtol=0, atol=1e-12)


def refused_without_a_loss(backend: str, settings: dict[str, Any]) -> None:
    strategy = unitrain.init(backend=backend, device="cpu", **settings)
    model, optimizer = strategy.prepare(net := nn.Linear(2, 1), torch.optim.SGD(net.parameters(), lr=0.1))
    output = model(torch.ones(2, 2))
    strategy.step(output.sum() if strategy.is_main else torch.zeros((), requires_grad=True), optimizer)


@pytest.mark.parametrize(
    ("backend", "settings"), [("ddp", {}), ("fsdp", {}), ("fsdp", {"fsdp": {"find_unused_parameters": True}})]
)
def test_a_rank_without_a_loss_of_the_model_is_named(backend: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"the loss of rank 1 does not depend on the optimizer's parameters \(weight"):
        run_ranks(refused_without_a_loss, backend, settings)
