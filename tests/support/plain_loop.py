"""Trains a small model on one process, with a plain loop and with a strategy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

import unitrain
from unitrain import Strategy

SAMPLES = 22


def strategy_of(**settings: Any) -> Strategy:
    return unitrain.init(**{"backend": "single", "precision": "fp64", **settings})


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64),
        torch.randn(SAMPLES, 2, generator=generator, dtype=torch.float64),
    )


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def plain(
    global_batch: int,
    epochs: int = 2,
    make: Callable[[nn.Module], Optimizer] = sgd,
    before_step: Callable[[nn.Module], object] = lambda model: None,
) -> nn.Sequential:
    """Train without UniTrain on whole global batches."""
    model = model_of()
    optimizer = make(model)
    inputs, targets = data().tensors
    for _, start in itertools.product(range(epochs), range(0, SAMPLES, global_batch)):
        rows = slice(start, start + global_batch)
        optimizer.zero_grad()
        mse_loss(model(inputs[rows]), targets[rows]).backward()  # type: ignore[no-untyped-call]
        before_step(model)
        optimizer.step()
    return model


def trained(strategy: Strategy, global_batch: int, epochs: int = 2) -> nn.Module:
    model = model_of()
    prepared, optimizer = strategy.prepare(model, sgd(model))
    loader = strategy.dataloader(data(), global_batch_size=global_batch)
    for _ in loader.epochs(epochs):
        for inputs, targets in loader:
            strategy.step(mse_loss(prepared(inputs), targets), optimizer)
    return model


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(weights(one), weights(other), rtol=1e-12, atol=1e-12)


def prepare_model(strategy: Strategy, seed: int = 0) -> tuple[Any, SGD]:
    """Return a prepared model and its optimizer."""
    model = model_of(seed)
    return strategy.prepare(model, sgd(model))


@pytest.fixture
def ready() -> tuple[Strategy, nn.Module, Optimizer]:
    strategy = strategy_of(accumulate=2)
    return strategy, *prepare_model(strategy)


Ready = tuple[Strategy, nn.Module, Optimizer]


def merged(*settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings in one dict, of which later ones take precedence, also within a section."""
    result: dict[str, Any] = {}
    for each in settings:
        for name, value in each.items():
            result[name] = {**result.get(name, {}), **value} if isinstance(value, dict) else value
    return result
