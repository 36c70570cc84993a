"""What training steps change is put back, into the same tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from unitrain.training.training_state import Copies


def train(net: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        net(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def tensors_of(net: nn.Module) -> list[torch.Tensor]:
    return [*net.parameters(), *net.buffers()]


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("make", [lambda p: SGD(p, 0.1, momentum=0.9), lambda p: Adam(p, lr=torch.tensor(0.1))])
def test_weights_buffers_and_states_are_put_back(make: Any, steps_before: int) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = make(net.parameters())
    train(net, optimizer, steps_before)
    before = [tensor.detach().clone() for tensor in tensors_of(net)]
    states = {p: {name: value.clone() for name, value in own.items()} for p, own in optimizer.state.items()}
    copies = Copies([optimizer.state], (), tensors_of(net))
    for _ in range(2):
        train(net, optimizer, 3)
        copies.put_back()
        torch.testing.assert_close([tensor.detach() for tensor in tensors_of(net)], before, rtol=0, atol=0)
        assert optimizer.state.keys() == states.keys()
        for parameter, own in states.items():
            torch.testing.assert_close(optimizer.state[parameter], own, rtol=0, atol=0)


def test_a_buffer_that_has_not_changed_is_not_written_to() -> None:
    """Buffers with a new version are broadcast after each step."""
    buffer = torch.zeros(3)
    copies = Copies((), (), [buffer])
    copies.put_back()
    assert buffer._version == 0
