"""``shares: auto`` gives a faster rank more samples, within an epoch, and trains like one process all the same."""

from __future__ import annotations

import re
from contextlib import redirect_stderr
from io import StringIO
from time import perf_counter
from typing import Any, NamedTuple

import pytest
import torch
from needs import HOROVOD
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset, Subset

import unitrain

SAMPLES, GLOBAL_BATCH, EPOCHS = 330, 16, 3  # 21 steps an epoch, of which 15 are measured


class Rows(Dataset[tuple[Tensor, Tensor, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        row = torch.randn(4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return torch.tensor(index), row, row[:2].sin()


class Heavy(nn.Module):
    """Works on each row, on some ranks more than on others, without an effect on the result."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        self.times = times
        self.ballast = torch.ones(200, 200)

    def forward(self, rows: Tensor) -> Tensor:
        for _ in range(self.times * len(rows)):
            self.ballast @ self.ballast
        out: Tensor = self.layers(rows)
        return out


class Found(NamedTuple):
    shares: tuple[int, ...]
    losses: list[float]
    epochs: list[list[int]]
    """The samples that this rank was given in each epoch."""
    seconds: list[float]
    """Durations of the epochs."""
    counts: list[int]
    said: str
    """What this rank wrote to stderr."""


def train(times: tuple[int, ...], *, ahead: bool = False, **settings: Any) -> Found:
    """Train on batches as they come, or on each after the next one was taken."""
    same: dict[str, Any] = {"precision": "fp64", "device": "cpu", "sync_batchnorm": True, "threads_per_process": 1}
    with redirect_stderr(StringIO()) as said, unitrain.init(timeout_s=60, **same, **settings) as strategy:
        torch.manual_seed(0)
        model = Heavy(times[strategy.rank])
        model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        loader = strategy.dataloader(Rows(), global_batch_size=GLOBAL_BATCH, shuffle=True)
        found = Found(strategy.shares, [], [], [], [], "")
        for _ in loader.epochs(EPOCHS):
            seen: list[int] = []
            meter, began = strategy.meter(), perf_counter()
            batches = iter(loader)
            batch = next(batches, None)
            while batch is not None:
                indices, rows, targets = batch
                loss = mse_loss(model(rows), targets)
                meter.add(mean=loss, count=len(rows))
                if not loader.stand_in:  # on a busy machine, shares may be extreme
                    seen += indices.tolist()
                found.counts.append(len(rows))
                if ahead:
                    batch = next(batches, None)
                strategy.step(loss, optimizer)
                if not ahead:
                    batch = next(batches, None)
            found.seconds.append(perf_counter() - began)
            found.epochs.append(seen)
            found.losses.append(meter.value())
        assert strategy.communicator.pulse.around is None, "nothing is timed any more"
        assert not strategy._step.hooks.before_call
        return found._replace(shares=strategy.shares, said=said.getvalue())


def test_a_slower_rank_gets_fewer_samples() -> None:
    """Ranks wait for one another in the forward, too, in synchronised BatchNorm: that does not count."""
    alone = train((0,), backend="single")
    ranks = run_ranks(train_slowed, False)
    fast, slow = ranks[0].shares
    assert fast > slow, ranks[0].said
    line = rf"unitrain: shares: {fast}:{slow}, from 10 steps: up to the backward, .* samples per second\n"
    assert len(re.findall(line, ranks[0].said)) == 1
    assert "shares" not in ranks[1].said
    for found in ranks:
        assert found.shares == (fast, slow)
        assert found.losses == pytest.approx(alone.losses, rel=0, abs=1e-9)
    for parts in zip(*(found.epochs for found in ranks), strict=True):
        assert sorted(parts[0] + parts[1]) == list(range(SAMPLES))
    before, after = ([found.counts[step] for found in ranks] for step in (14, 17))
    assert before == [8, 8]
    assert after[0] > after[1], "within the epoch"
    print(f"an epoch takes {ranks[0].seconds[-1] / ranks[0].seconds[0]:.2f} of the time with shares {fast}:{slow}")


def test_shares_stay_as_they_are_if_batches_are_taken_ahead_of_their_steps() -> None:
    first, second = run_ranks(train_slowed, True)
    assert first.shares == second.shares == (1, 1)
    assert "unitrain: shares: 1:1, since the script takes batches ahead of their steps" in first.said
    assert first.losses == pytest.approx(train((0,), backend="single").losses, rel=0, abs=1e-9)


def train_slowed(ahead: bool) -> Found:
    return train((1, 12), ahead=ahead, backend="ddp", shares="auto")


def train_adversaries(times: tuple[int, ...]) -> tuple[int, ...]:
    """Train two models in turn, of which the second is a heavy one."""
    same: dict[str, Any] = {"device": "cpu", "sync_batchnorm": True, "threads_per_process": 1}
    with unitrain.init(backend="horovod", shares="auto", **same) as strategy:
        light, heavy = nn.Linear(4, 2), Heavy(times[strategy.rank])
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (light, heavy)]
        light, heavy = strategy.prepare(light, heavy)
        loader = strategy.dataloader(Rows(), global_batch_size=GLOBAL_BATCH)
        for _, rows, _ in loader:
            for model, optimizer in zip((light, heavy), optimizers, strict=True):
                strategy.step(model(rows.float()).square().mean(), optimizer)
        return strategy.shares


def train_single_samples() -> tuple[tuple[int, ...], str]:
    """Train on global batches of one sample, which is rank 0's."""
    with redirect_stderr(StringIO()) as said, unitrain.init(backend="horovod", device="cpu", shares="auto") as strategy:
        model = nn.Linear(4, 2)
        model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for _, rows, _ in strategy.dataloader(Subset(Rows(), range(20)), global_batch_size=1):
            strategy.step(model(rows.float()).square().mean(), optimizer)
        return strategy.shares, said.getvalue()


def train_others() -> tuple[Any, ...]:
    return train_adversaries((1, 12)), train_single_samples()


@HOROVOD
def test_the_work_for_every_optimizer_counts_and_without_any_shares_stay_equal() -> None:
    (adversaries, (shares, said)), second = run_ranks(train_others, launcher="horovodrun")
    assert adversaries[0] > adversaries[1]
    assert shares == (1, 1)
    assert "unitrain: shares: 1:1, since no work on a batch was seen on rank 1\n" in said
    assert second[0] == adversaries
    assert second[1][0] == shares
