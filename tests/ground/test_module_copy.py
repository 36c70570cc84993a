"""Modules whose layers keep what they have computed, with its graph: they are sharded, trained and exported."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import unitrain


class Attention(nn.Module):
    """A layer with torch's older weight_norm, which keeps its computed weight, and the last map that it computed."""

    def __init__(self) -> None:
        super().__init__()
        with pytest.warns(FutureWarning, match="deprecated in favor of"):
            self.scores = nn.utils.weight_norm(nn.Linear(4, 4))
        self.last_map: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last_map = self.scores(x).softmax(-1)
        return self.last_map * x


def train_and_export(backend: str) -> tuple[float, float]:
    with unitrain.init(backend=backend, precision="fp64", device="cpu", timeout_s=60) as strategy:
        module = Attention()
        model, optimizer = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        x = torch.arange(8, dtype=torch.float64).reshape(2, 4)
        for _ in range(2):
            strategy.step(model(x).square().mean(), optimizer, weight=1)
        exported = strategy.export(model)
        assert type(exported) is Attention
        with strategy.evaluation(model), torch.no_grad():
            return model(x).sum().item(), exported(x).sum().item()


def test_an_exported_copy_computes_what_the_model_does() -> None:
    [(expected, exported)] = run_ranks(train_and_export, "single", nprocs=1)
    assert exported == expected
    for found in run_ranks(train_and_export, "fsdp"):
        assert found == pytest.approx((expected, expected), abs=1e-9)
