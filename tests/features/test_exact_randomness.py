"""``exact_randomness``: dropout that depends on the sample, and not on the number of ranks and micro-batches."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from needs import HOROVOD
from pretended import pretended_rank
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset
from torchvision.ops import StochasticDepth

import unitrain
from unitrain import ConfigError, UsageError
from unitrain.features.exact_randomness.draws import SampleDraw, mix
from unitrain.features.exact_randomness.randomness import ExactRandomness
from unitrain.rng import mixed

WIDTH, LENGTH, SAMPLES, GLOBAL_BATCH = 8, 5, 22, 6
EXACT = 1e-9


class Random(nn.Module):
    """Every kind of random operator that is covered, on tensors of several shapes."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
        self.drop = nn.Sequential(nn.Dropout(0.3), nn.Dropout1d(0.2), nn.AlphaDropout(0.1), nn.FeatureAlphaDropout(0.1))
        self.depth = StochasticDepth(0.3, mode="row")
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.mix, x, use_reentrant=False) if self.checkpointed else self.mix(x)
        x = x + 0.1 * torch.randn_like(x) + 0.1 * torch.rand(len(x), 1, 1)
        x = x + 0.1 * torch.randint(3, (len(x), 1, 1)) + 0.1 * torch.randint(-5, -2, (len(x), LENGTH, 1), dtype=x.dtype)
        x = x * torch.bernoulli(torch.full_like(x, 0.9)) * torch.empty_like(x).uniform_(0.5, 1.5)
        if torch.rand(()) < 0.5:  # a layer that is dropped for the whole batch
            x = x + 1
        out: Tensor = self.last(x.mean(1))
        return out

    def mix(self, x: Tensor) -> Tensor:
        x = x + self.depth(self.attention(x, x, x, need_weights=False)[0])
        out: Tensor = self.drop(self.block(torch.tanh(self.inner(F.dropout(x, 0.2, self.training)))))
        return out


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(SAMPLES, *shape, generator=generator).double() for shape in ((LENGTH, WIDTH), (1,))]
    return TensorDataset(*drawn)


def train(
    folder: Path | None = None, epochs: int = 2, stop_after: int = 0, *, checkpointed: bool = False, **settings: Any
) -> list[float]:
    """Train, and return the weights. With ``folder``, resume from it, and save in it after ``stop_after`` steps."""
    settings = {"precision": "fp64", "exact_randomness": True, "device": "cpu", **settings}
    with unitrain.init(**settings) as strategy:
        model = Random(checkpointed=checkpointed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = strategy.prepare(model, optimizer)
        loader = strategy.dataloader(data(), global_batch_size=GLOBAL_BATCH, shuffle=True)
        saved = strategy.checkpoint(folder, model=model, optimizer=optimizer, loader=loader) if folder else None
        if saved is not None:
            saved.resume()
        for _ in loader.epochs(epochs):
            for x, y in loader:
                strategy.step(F.mse_loss(model(x), y), optimizer)
                if saved is not None and strategy.global_step == stop_after:
                    saved.save()
                    saved.wait()
                    return []
        return torch.cat([p.flatten() for p in strategy.export(model).parameters()]).tolist()


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return train()


def difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_it_is_random(alone: list[float]) -> None:
    assert difference(alone, train(seed=1)) > 0.01
    assert difference(alone, train(exact_randomness=False)) > 0.01


@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"checkpointed": True}])
def test_micro_batches_and_checkpointed_activations_draw_the_same(alone: list[float], settings: dict[str, Any]) -> None:
    assert difference(alone, train(**settings)) < EXACT


@pytest.mark.parametrize(
    ("nprocs", "settings"),
    [
        (2, {"backend": "ddp"}),
        (3, {"backend": "ddp", "accumulate": 2, "checkpointed": True}),
        (2, {"backend": "ddp", "shares": (2, 1), "shard_optimizer": True}),
        (2, {"backend": "fsdp", "checkpointed": True}),
        pytest.param(3, {"backend": "horovod", "accumulate": 2}, marks=HOROVOD),
    ],
    ids=str,
)
def test_any_number_of_ranks_trains_the_same(alone: list[float], nprocs: int, settings: dict[str, Any]) -> None:
    launcher: Any = "horovodrun" if settings["backend"] == "horovod" else "spawn"
    for weights in run_ranks(partial(train, **settings), nprocs=nprocs, launcher=launcher):
        assert difference(alone, weights) < EXACT


def test_a_run_that_is_resumed_on_other_ranks_trains_the_same(alone: list[float], tmp_path: Path) -> None:
    run_ranks(partial(train, tmp_path, stop_after=3, backend="ddp"))
    assert difference(alone, train(tmp_path)) < EXACT


class Lambda(nn.Module):
    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.apply_to = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_to(x) * self.weight


def once(forward: Callable[[Tensor], Tensor], *, loaded: bool = True) -> None:
    with unitrain.init(backend="single", device="cpu", exact_randomness=True) as strategy:
        model = strategy.prepare(Lambda(forward))
        rows = torch.randn(6, 4)
        for (x,) in strategy.dataloader(TensorDataset(rows), batch_size=6) if loaded else [(rows,)]:
            model(x)


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (lambda x: F.dropout(x.t()), r"of shape \(4, 6\), whose first dimension is not the 6 samples"),
        (lambda x: x + torch.rand(1, 4), r"of shape \(1, 4\)"),
        (lambda x: x + torch.randperm(4), "does not cover aten::randperm"),
        (lambda x: x * random.random(), "python's or numpy's"),
        (lambda x: x * np.random.rand(), "python's or numpy's"),
    ],
)
def test_what_is_not_covered_is_refused(forward: Callable[[Tensor], Tensor], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        once(forward)


def test_samples_of_unknown_place_are_refused() -> None:
    with pytest.raises(UsageError, match=r"take the batches from a loader of strategy\.dataloader"):
        once(F.dropout, loaded=False)
    once(lambda x: x, loaded=False)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (nn.LSTM(4, 4, num_layers=2, dropout=0.1), "Make it with dropout=0"),
        (nn.TransformerEncoderLayer(4, 2, dropout=0.1), r"self_attn is a MultiheadAttention .* with batch_first=True"),
    ],
)
def test_layers_with_another_first_dimension_are_refused(layer: nn.Module, said: str) -> None:
    with unitrain.init(backend="single", device="cpu", exact_randomness=True) as strategy:
        with pytest.raises(ConfigError, match=said):
            strategy.prepare(layer)
        strategy.prepare(nn.LSTM(4, 4, num_layers=2), nn.TransformerEncoderLayer(4, 2, dropout=0.0))


@pytest.mark.parametrize("setting", [{"compile": True}, {"compression": "powersgd"}])
def test_settings_that_exclude_it(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"exact_randomness.*{next(iter(setting))}.*mutually exclusive"):
        unitrain.init(exact_randomness=True, **setting)


def test_a_device_without_float64_is_refused() -> None:
    sockets = pretended_rank().sockets
    sockets.communicator.device = torch.device("mps")
    with pytest.raises(ConfigError, match=r"exact_randomness draws numbers in float64, which device mps lacks"):
        ExactRandomness().plug_in(sockets)


def test_a_process_that_splits_batches_over_several_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = (torch.device("cpu"),) * 2
    monkeypatch.setattr("unitrain.backends.data_parallel._devices", lambda config: devices)
    with pytest.raises(ConfigError, match=r"not supported by backend data_parallel on 2 devices.*nproc-per-node 2"):
        unitrain.init(backend="data_parallel", device="cpu", exact_randomness=True)


def test_evaluations_exports_and_the_process_s_generator_are_as_before() -> None:
    with unitrain.init(backend="single", device="cpu", exact_randomness=True) as strategy:
        model = strategy.prepare(nn.Dropout(0.5))
        x = torch.ones(3, 4)
        before = torch.get_rng_state()
        for (rows,) in strategy.dataloader(TensorDataset(x), batch_size=3):
            first, second = model(rows), model(rows)
        assert torch.equal(torch.get_rng_state(), before)
        assert not torch.equal(first, second), "two forwards of a batch differ"
        assert torch.equal(model.eval()(x), x)
        exported = strategy.export(model).train()
        assert not torch.equal(exported(x), exported(x)), "a plain module again"


def draw(shape: tuple[int, ...], seed: int = 3) -> SampleDraw:
    return SampleDraw(torch.arange(shape[0]) * 7919 + seed, shape)


def test_the_numbers_are_distributed_as_they_should() -> None:
    samples, each = 64, 4_001
    size = samples * each
    for dtype in (torch.float32, torch.float64):
        uniform = draw((samples, each)).uniform(dtype)
        assert uniform.dtype == dtype
        assert 0 <= float(uniform.min()) < 1e-4 < 1 - 1e-4 < float(uniform.max()) < 1
        counts = torch.histc(uniform, 100, 0, 1)
        assert float(((counts - size / 100) ** 2 / (size / 100)).sum()) < 160, "chi-squared of 99 degrees, p = 1e-4"
        normal = draw((samples, each)).normal(dtype).double()
        assert abs(float(normal.mean())) < 4 / math.sqrt(size)
        assert abs(float(normal.var()) - 1) < 4 * math.sqrt(2 / size)
        assert abs(float((normal**4).mean()) - 3) < 4 * math.sqrt(96 / size)
    for probability in (0.0, 0.001, 0.1, 0.9, 1.0):
        share = float(draw((samples, each)).below(probability).double().mean())
        assert abs(share - probability) <= 4 * math.sqrt(probability * (1 - probability) / size)


def test_rows_columns_and_draws_are_independent() -> None:
    rows = draw((200, 1_000)).uniform(torch.float64) - 0.5
    for matrix in (rows, rows.t()):
        correlations = torch.corrcoef(matrix) - torch.eye(len(matrix))
        assert float(correlations.abs().max()) < 6 / math.sqrt(matrix.shape[1])
    other = draw((200, 1_000), seed=4).uniform(torch.float64) - 0.5
    assert abs(float((rows * other).mean())) * 12 < 4 / math.sqrt(rows.numel())


def test_the_hash_is_the_one_of_sample_seeds() -> None:
    golden = 0x9E3779B97F4A7C15 - 2**64
    found = mix(torch.arange(1, 100) * golden + 12345)
    assert found.tolist() == mixed(np.arange(99), 12345).view(np.int64).tolist()
