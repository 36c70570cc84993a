"""A small model, its data and a strategy of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
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
