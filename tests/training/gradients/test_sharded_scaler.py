"""fp16 under fsdp: all ranks skip a step alike when the gradient of one overflows, and lower the scale."""

from __future__ import annotations

import math

import torch
from ranks import run_ranks
from torch import Tensor, nn

import unitrain


class Scaled(nn.Module):
    """A layer, and a scalar, which can't be divided among ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)  # of whose only row, the last rank has nothing
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * self.scale
        return out


def train(backend: str) -> tuple[list[bool], list[float], dict[str, Tensor]]:
    """Return which steps were made, the scale after each, and the weights."""
    with unitrain.init(backend=backend, device="cpu", precision="fp16", clip_norm=1.0, timeout_s=30) as strategy:
        torch.manual_seed(0)
        model, optimizer = strategy.prepare(model := Scaled(), torch.optim.SGD(model.parameters(), lr=0.1))
        stepped, scales = [], []
        for step in range(3):
            loss = model(torch.full((2, 3), 1.0 + strategy.rank)).float().square().mean() * 1e-3
            if step == 1 and strategy.rank == 1:
                loss = loss * math.inf
            stepped.append(strategy.step(loss, optimizer).stepped)
            scaler = strategy._step.scale.scaler
            assert scaler is not None
            scales.append(scaler.get_scale())
        return stepped, scales, strategy.export(model).state_dict()


def test_a_model_with_a_scalar_trains_as_with_whole_gradients() -> None:
    expected = run_ranks(train, "ddp")[0]
    for stepped, scales, weights in run_ranks(train, "fsdp"):
        assert stepped == expected[0] == [True, False, True]
        assert scales == expected[1] == [2.0**16, 2.0**15, 2.0**15]
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[2][name])
