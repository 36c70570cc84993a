"""``activation_checkpointing``: the same training with less memory, and nothing counted twice."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from needs import HOROVOD
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.data import TensorDataset

import unitrain
from unitrain import Strategy

EXACT = 1e-9


class Block(nn.Module):
    """A layer with BatchNorm, dropout and buffers that a forward reads and changes, in place and by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(4, 4, 1)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))
        self.calls: Tensor
        self.scale: Tensor

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        if self.training:
            self.calls.add_(1)
            self.scale = 0.9 * self.scale + 0.1 * x.detach().square().mean()
        out: Tensor = x + self.drop(torch.tanh(self.norm(self.layer(x)))) / self.scale + shift
        return out


class Net(nn.Module):
    def __init__(self, dropout: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(4, 2)
        for block in self.blocks if not dropout else ():
            block.drop = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, shift=0.1)
        out: Tensor = self.last(x.mean(2))
        return out


def _open(**settings: Any) -> Strategy:
    return unitrain.init(**{"precision": "fp64", "timeout_s": 60, **settings})


def _samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(23, 4, 3, generator=generator), torch.randn(23, 2, generator=generator))


def _trained(wanted: bool | Sequence[str], **settings: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of this rank and the final state; the last batch of 11, 11 and 1 has stand-ins."""
    with _open(activation_checkpointing=wanted, **settings) as strategy:
        torch.manual_seed(0)
        module = Net(dropout=not settings.get("compile"))
        model, optimizer = strategy.prepare(module, SGD(module.parameters(), lr=0.1))
        train = strategy.dataloader(_samples(), global_batch_size=11)
        losses = []
        for _ in train.epochs(2):
            for x, y in train:
                loss = mse_loss(model(x), y.double())
                strategy.step(loss, optimizer)
                losses.append(loss.item())
        return losses, copy.deepcopy(module.state_dict())


def _compare(**settings: Any) -> None:
    expected, plain = _trained(False, **{**settings, "compile": False} if "dropout" in settings else settings)
    losses, state = _trained(["Block"], **settings)
    assert losses == pytest.approx(expected, abs=EXACT, rel=0)
    assert state.keys() == plain.keys()
    for name in plain:
        torch.testing.assert_close(state[name], plain[name], rtol=0, atol=EXACT, msg=name)


def test_one_process() -> None:
    _compare(backend="single", accumulate=2)


@pytest.mark.parametrize("sync_batchnorm", [False, True])
@pytest.mark.parametrize("launcher", ["spawn", pytest.param("horovodrun", marks=HOROVOD)])
def test_ranks(launcher: Any, sync_batchnorm: bool) -> None:
    run_ranks(_on_ranks, sync_batchnorm, launcher=launcher)


def _on_ranks(sync_batchnorm: bool) -> None:
    _compare(sync_batchnorm=sync_batchnorm)


def _compiled() -> None:
    _compare(sync_batchnorm=True, compile=True, compile_backend="aot_eager")


def test_compiled() -> None:
    run_ranks(_compiled)
