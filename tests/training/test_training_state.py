"""What training steps change is put back, into the same tensors."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from unitrain.training.training_state import TrainingState


class Net(nn.Module):
    """Changes a buffer in place, assigns another tensor to one, and has BatchNorm and tied weights."""

    calls: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.outer = nn.Linear(3, 3)
        self.outer.weight = self.inner.weight
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.detach()[0]
        out: Tensor = self.outer(self.norm(self.inner(x)))
        return out


class Counting(SGD):
    """An optimizer that keeps numbers in its groups and in itself, as schedule-free ones do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.steps += 1
        self.param_groups[0]["sum"] = self.param_groups[0].get("sum", 0) + 1
        self.param_groups[0]["lr"] *= 0.5


def train(net: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        net(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def facts(net: Net, optimizer: Optimizer) -> Any:
    state = copy.deepcopy(optimizer.state_dict())
    own = {name: copy.deepcopy(value) for name, value in vars(optimizer).items() if isinstance(value, (int, float))}
    return [{name: t.clone() for name, t in [*net.named_parameters(), *net.named_buffers()]}, state, own]


def draws() -> list[Any]:
    return [random.random(), float(np.random.rand()), torch.rand(3)]


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("make", [Counting, Adam, lambda p: Adam(p, lr=torch.tensor(0.1), amsgrad=True)])
def test_all_state_is_put_back(make: Any, steps_before: int) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = make(net.parameters())
    train(net, optimizer, steps_before)
    tensors = {name: id(t) for name, t in [*net.named_parameters(), *net.named_buffers()]}
    states = {id(p): {k: id(v) for k, v in its.items()} for p, its in optimizer.state.items()}
    before = facts(net, optimizer)
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
    coming = draws()
    random.setstate(generators[0])
    np.random.set_state(generators[1])
    torch.set_rng_state(generators[2])

    state = TrainingState([net], [optimizer])
    for _ in range(2):
        with state.restored():
            train(net, optimizer, 3)
            draws()
        torch.testing.assert_close(facts(net, optimizer), before, rtol=0, atol=0)
    torch.testing.assert_close(draws(), coming, rtol=0, atol=0)
    assert {name: id(t) for name, t in [*net.named_parameters(), *net.named_buffers()]} == tensors
    assert net.outer.weight is net.inner.weight
    if make is not Counting:  # a number that is assigned is another object
        assert {id(p): {k: id(v) for k, v in its.items()} for p, its in optimizer.state.items()} == states


def test_gradients_are_set_aside_and_put_back() -> None:
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    weight.grad = gradient = torch.full((2,), 3.0)
    with TrainingState([], [SGD([weight, other], lr=0.1)]).restored():
        assert weight.grad is None
        (weight * other).sum().backward()
    assert weight.grad is gradient
    assert gradient.tolist() == [3, 3]
    assert other.grad is None


def test_it_is_put_back_after_an_error() -> None:
    net = Net()
    optimizer = Adam(net.parameters())
    before = facts(net, optimizer)
    state = TrainingState([net], [optimizer])

    def fail() -> None:
        with state.restored():
            train(net, optimizer, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    torch.testing.assert_close(facts(net, optimizer), before, rtol=0, atol=0)


def test_a_buffer_that_has_not_changed_is_not_written_to() -> None:
    """Buffers with a new version are broadcast after each step."""
    net = Net()
    version = net.calls._version
    with TrainingState([net], []).restored():
        net.inner(torch.ones(1, 3))
    assert net.calls._version == version
