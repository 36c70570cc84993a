"""``ranks_per_batch``: ranks that compute with parts of samples train what one process does with whole samples."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from needs import FSDP, HOROVOD
from ranks import on_ranks, run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import unitrain
from unitrain import BatchGroup, ConfigError, DataError, Strategy, UsageError
from unitrain.features.ema import EMA
from unitrain.features.throughput import Throughput

SAMPLES, WIDTH, CLIP, DECAY, EPOCHS, HALF = 23, 4, 0.3, 0.9, 2, 5


class Mixing(nn.Module):
    """Mixes the positions of a sample by attention, and subtracts their mean."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm == "batch" else nn.GroupNorm(2, WIDTH)
        self.outer = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, group: BatchGroup, length: int) -> Tensor:
        queries, keys, values = self.inner(x).chunk(3, -1)
        keys, values = group.gather(torch.stack([keys, values]), 2, length)
        x = x + F.scaled_dot_product_attention(queries, keys, values)
        x = x - group.sum(x.sum(1, keepdim=True)) / length
        rows = self.norm(x.reshape(-1, WIDTH)).view(x.shape)
        return self.outer(rows).squeeze(2)  # type: ignore[no-any-return]


def model_of(norm: str) -> Mixing:
    torch.manual_seed(3)
    return Mixing(norm).double()


def samples(length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, length, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sin().sum(2) + 0.1 * torch.arange(length))


def flat(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.double().reshape(-1) for value in state.values()])


def by_hand(length: int, batch: int, norm: str) -> dict[str, Any]:
    """Return what a plain loop on whole samples trains and measures."""
    model, alone = model_of(norm), BatchGroup()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average, norms, losses = {name: value.clone() for name, value in model.state_dict().items()}, [], 0.0
    xs, ys = samples(length).tensors
    for _ in range(EPOCHS):
        for x, y in zip(torch.split(xs, batch), torch.split(ys, batch), strict=True):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x, alone, length), y)
            loss.backward()  # type: ignore[no-untyped-call]
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            losses += float(loss.detach()) * len(x)
            for name, value in model.state_dict().items():
                average[name] = DECAY * average[name] + (1 - DECAY) * value if value.is_floating_point() else value
    return {
        "weights": flat(model.state_dict()),
        "average": flat(average),
        "norms": norms,
        "loss": losses / (EPOCHS * SAMPLES),
        "predicted": model.eval()(xs, alone, length).detach(),
    }


def train(
    length: int, batch: int, norm: str, settings: dict[str, Any], folder: Path | None = None, stop: int = -1
) -> dict[str, Any]:
    """Train on parts of samples; with ``stop``, up to a checkpoint after so many steps, from which others continue."""
    with unitrain.init(**{"precision": "fp64", "clip_norm": CLIP, "device": "cpu", **settings}) as strategy:
        group, model = strategy.batch_group, model_of(norm)
        model, optimizer = strategy.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        average, throughput = strategy.add(EMA(model, decay=DECAY)), strategy.add(Throughput())
        data = samples(length)
        loader = strategy.dataloader(data, global_batch_size=batch)
        losses, seen, norms = strategy.meter(), strategy.meter(), []
        if folder is not None:
            checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer, average=average, loader=loader)
            assert checkpoint.resume() is (stop < 0)
        for _ in loader.epochs(EPOCHS):
            for x, y in loader:
                part = group.part(y, 1)
                loss = F.mse_loss(model(group.part(x, 1), group, length), part)
                # If the parts are equal, the mean of their means is the mean over the whole.
                weight = part.numel() if length % group.size else None
                norms.append(strategy.step(loss, optimizer, weight=weight).grad_norm)
                losses.add(mean=loss, count=part.numel())
                seen.add(total=0.0, count=len(x))
                if strategy.global_step == stop:
                    checkpoint.save()
                    return {}
        seconds = torch.tensor(throughput._seconds, device=strategy.device)
        rate = throughput.read()["samples_per_second"]
        parts = []
        with strategy.evaluation(model):
            val = strategy.dataloader(data, global_batch_size=batch)
            for x, _ in val:
                whole = group.gather(model(group.part(x, 1), group, length), 1, length)
                parts.append(strategy.gather(whole, in_order=val).cpu())
        return {
            "weights": flat(strategy.export(model).state_dict()),
            "average": flat(strategy.export(average).state_dict()),
            "norms": [float(norm) for norm in norms if norm is not None],
            "loss": losses.value(),
            "predicted": torch.cat(parts),
            "seen": seen.count(),
            "fast": float(strategy.all_reduce(seconds, "max")) * rate,
        }


def assert_same(of_ranks: list[dict[str, Any]], expected: dict[str, Any], samples: int) -> None:
    """Assert that all ranks have what a plain loop has, and have counted each sample once."""
    for result in of_ranks:
        assert result.pop("seen") == samples
        assert result.pop("fast") == pytest.approx(samples)
        for name, value in result.items():
            torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(expected[name]), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("backend", "nprocs", "ranks_per_batch", "data", "more"),
    [
        ("single", 1, 1, (4, 11, "group"), {}),
        pytest.param("ddp", 4, 2, (4, 11, "group"), {}, id="ddp-equal-parts"),  # and a group without samples
        pytest.param("ddp", 2, 2, (5, 6, "batch"), {"sync_batchnorm": True, "shard_optimizer": True}, id="ddp-zero"),
        pytest.param(
            "horovod",
            4,
            2,
            (5, 6, "group"),
            {"accumulate": 2},
            id="horovod",
            marks=[HOROVOD, pytest.mark.slow("four new processes import Horovod, for process sets")],
        ),
    ],
)
def test_parts_of_samples_train_what_whole_samples_do(
    backend: str, nprocs: int, ranks_per_batch: int, data: tuple[int, int, str], more: dict[str, Any]
) -> None:
    settings = {"backend": backend, "ranks_per_batch": ranks_per_batch, **more}
    results = run_ranks(train, *data, settings, nprocs=nprocs, launcher="python" if nprocs == 1 else None)
    assert_same(results, by_hand(*data), EPOCHS * SAMPLES)


@FSDP
def test_fsdp_stops_and_other_groups_continue(tmp_path: Path) -> None:
    data = 5, 6, "batch"
    settings = {"backend": "fsdp", "ranks_per_batch": 2, "sync_batchnorm": True}
    run_ranks(train, *data, settings, tmp_path, HALF, nprocs=4)
    settings.update(backend="ddp", ranks_per_batch=3)
    expected, results = by_hand(*data), run_ranks(train, *data, settings, tmp_path, nprocs=3)
    for result in results:  # which was measured from there on
        assert result.pop("loss") < expected["loss"]
        result["norms"] = [*expected["norms"][:HALF], *result["norms"]]
    assert_same(results, expected, EPOCHS * SAMPLES - 29)


def draw(strategy: Strategy) -> list[float]:
    """Return numbers that all ranks have drawn."""
    drawn = torch.tensor([torch.rand(()), np.random.rand(), random.random()], dtype=torch.float64)
    return [float(each) for each in strategy.communicator.all_gather(drawn).sum(1)]


def draws(settings: dict[str, Any], folder: Path) -> tuple[list[float], list[float], bool]:
    """Return what ranks draw in a loop after forwards that have drawn other numbers on each, and after a resume."""
    with unitrain.init(backend="ddp", device="cpu", **settings) as strategy:
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = strategy.dataloader(TensorDataset(torch.ones(8, 2)), global_batch_size=4)
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer, loader=loader, background=False)
        resumed = checkpoint.resume()
        after_resume = draw(strategy)
        in_loop: list[float] = []
        for _ in range(1 if resumed else 0, 2):
            for (x,) in loader:
                in_loop = draw(strategy)
                loss = model(x.repeat(1 + strategy.rank, 1)).mean()
                strategy.step(loss, optimizer, weight=1)
        with strategy.evaluation(model):
            in_loop += draw(strategy)
        checkpoint.save()
        return in_loop, after_resume, resumed


def test_random_numbers_are_equal_within_a_group(tmp_path: Path) -> None:
    def alike(numbers: list[float], size: int) -> None:
        firsts = numbers[::size]
        assert numbers == [first for first in firsts for _ in range(size)]
        assert len(set(firsts)) == len(firsts)

    for ranks_per_batch, nprocs in [(2, 4), (2, 4), (1, 4), (2, 2)]:
        in_loop, after_resume, _ = run_ranks(draws, {"ranks_per_batch": ranks_per_batch}, tmp_path, nprocs=nprocs)[0]
        alike(after_resume, ranks_per_batch)
        for begin in range(0, len(in_loop), nprocs):
            alike(in_loop[begin : begin + nprocs], ranks_per_batch)


class Own(Dataset[Any]):
    """Returns other samples on each rank of a group, in a list and a dict."""

    fingerprint = "declared"

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return [{"image": torch.full((2,), float(index))}, f"of rank {self._rank}"]


@on_ranks()
def test_other_data_in_a_group_are_noticed() -> None:
    with unitrain.init(backend="ddp", ranks_per_batch=2) as strategy:
        loader = strategy.dataloader(Own(strategy.rank), global_batch_size=2)
        with pytest.raises(DataError, match="rank 1 got another batch than rank 0, but they share batches"):
            next(iter(loader))


@on_ranks()
def test_equal_losses_in_a_group_are_no_copies() -> None:
    with unitrain.init(backend="ddp", ranks_per_batch=2) as strategy:
        model = nn.Linear(2, 1)
        model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(4):
                strategy.step(model(torch.ones(3, 2)).mean(), optimizer)
        with pytest.raises(UsageError, match=r"2 of 6 elements of dimension 0 .* where part\(\) has 3"):
            strategy.batch_group.gather(torch.ones(2), 0, 6)


@on_ranks()
def test_a_number_of_ranks_that_is_no_multiple_is_refused() -> None:
    with pytest.raises(ConfigError, match="ranks_per_batch is 3, but this job has 2 ranks: start a multiple of 3"):
        unitrain.init(backend="ddp", ranks_per_batch=3)


@pytest.mark.parametrize(
    "other",
    [{"local_sgd": {"steps": 2}}, {"exact_randomness": True}, {"shares": (1, 2)}],
    ids=lambda other: next(iter(other)),
)
def test_what_can_not_be_right_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"ranks_per_batch is 2, and .* mutually exclusive"):
        unitrain.init(backend="single", ranks_per_batch=2, **other)
