"""Gradients in fewer bits: what is sent, what is refused, and weights that are narrow themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import unitrain

WORLDS = [("ddp", "spawn", "fp16"), ("ddp", "spawn", "bf16"), ("horovod", "horovodrun", "fp16")]


def train(settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[torch.dtype]]:
    """Return the weights after a few steps, and in which types the strategy's own collectives summed gradients."""
    with unitrain.init(**settings) as strategy:
        sent: list[torch.dtype] = []
        reduce = strategy._all_reduce

        def noting(tensor: Tensor, op: str, name: str) -> Any:
            if name.startswith("gradients"):
                sent.append(tensor.dtype)
            return reduce(tensor, op, name)

        strategy._all_reduce = noting  # type: ignore[method-assign]
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
        model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(2)).to(dtype)
        for _ in range(5):
            strategy.step(model(rows[strategy.rank :: strategy.world_size]).square().mean(), optimizer)
        return torch.cat([p.detach().reshape(-1).float() for p in model.parameters()]), sent


@pytest.mark.parametrize(("backend", "launcher", "compression"), WORLDS)
def test_compressed_gradients_are_near_and_equal_on_all_ranks(backend: str, launcher: str, compression: str) -> None:
    plain, _ = train({"backend": "single"})
    settings = {"backend": backend, "compression": compression}
    (first, sent), (second, _) = run_ranks(train, settings, launcher=launcher)  # type: ignore[arg-type]
    assert torch.equal(first, second)
    difference = (first - plain).abs().max()
    assert 0 < difference < 5e-3  # rounded, so not the same; and no more than rounded
    if backend == "horovod":
        assert set(sent) == {torch.float16}


@pytest.mark.parametrize(("backend", "launcher"), [("ddp", "spawn"), ("horovod", "horovodrun")])
def test_a_model_whose_own_weights_are_bf16_trains(backend: str, launcher: str) -> None:
    plain, _ = train({"backend": "single"}, torch.bfloat16)
    ranks = run_ranks(train, {"backend": backend}, torch.bfloat16, launcher=launcher)  # type: ignore[arg-type]
    assert torch.equal(ranks[0][0], ranks[1][0])
    assert (ranks[0][0] - plain).abs().max() < 2e-2


def test_what_horovod_cannot_send_is_refused() -> None:
    with pytest.raises(unitrain.ConfigError, match=r"compression 'bf16' can't be honoured by backend 'horovod'"):
        run_ranks(train, {"backend": "horovod", "compression": "bf16"}, launcher="horovodrun")


def test_alone_there_is_nothing_to_compress() -> None:
    with pytest.warns(UserWarning, match="without effect under backend 'single': compression=fp16"):
        train({"backend": "single", "compression": "fp16"})


def draws() -> tuple[float, float]:
    with unitrain.init(backend="ddp", seed=3) as strategy:
        shared = torch.rand(()).item()
        strategy.prepare(nn.Linear(1, 1))
        return shared, torch.rand(()).item()


def test_ranks_draw_alike_until_prepare_and_apart_after() -> None:
    (shared, own), (also_shared, other) = run_ranks(draws)
    assert shared == also_shared
    assert own != other
