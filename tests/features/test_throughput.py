"""``Throughput``: what it counts and times, and that it costs nothing if it is not used."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import unitrain
from unitrain import Strategy
from unitrain.features.throughput import Throughput

WAIT_S = 0.02


def train(strategy: Strategy, data: Any, epochs: int = 1, busy: Any = None) -> None:
    """Train a linear layer in global batches of 8, and let ``busy`` run between a forward and its step."""
    model = nn.Linear(4, 1)
    prepared, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = strategy.dataloader(data, global_batch_size=8)
    for _ in loader.epochs(epochs):
        for (inputs,) in loader:
            loss = prepared(inputs).square().mean()
            if busy is not None:
                busy()
            strategy.step(loss, optimizer)


def rows(count: int) -> TensorDataset:
    return TensorDataset(torch.ones(count, 4))


class Slow(IterableDataset[tuple[Tensor]]):
    """Takes ``WAIT_S`` for each of 16 samples."""

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        for _ in range(16):
            time.sleep(WAIT_S)
            yield (torch.ones(4),)


def test_time_is_split_into_data_step_and_rest() -> None:
    strategy = unitrain.init(backend="single")
    throughput = strategy.add(Throughput())
    began = time.perf_counter()
    train(strategy, Slow(), busy=lambda: time.sleep(3 * WAIT_S))
    took = time.perf_counter() - began
    found = throughput.read()
    assert found["data_seconds"] >= 16 * WAIT_S
    assert found["rest_seconds"] >= 2 * 3 * WAIT_S
    assert found["step_seconds"] > 0
    seconds = found["data_seconds"] + found["step_seconds"] + found["rest_seconds"]
    assert seconds <= took
    assert found["samples_per_second"] == pytest.approx(16 / seconds)
    assert 50 < found["peak_memory_mb"] < 100_000


def test_a_reading_begins_anew_and_an_evaluation_after_the_epoch_is_not_counted() -> None:
    strategy = unitrain.init(backend="single")
    throughput = strategy.add(Throughput())
    train(strategy, rows(20))
    assert throughput.read()["samples_per_second"] > 0
    model = nn.Linear(4, 1)
    with strategy.evaluation(model):
        for (inputs,) in strategy.dataloader(rows(16), batch_size=8):
            model(inputs)
            time.sleep(WAIT_S)
    nothing = throughput.read()
    del nothing["peak_memory_mb"]
    times = {"data_seconds": 0.0, "step_seconds": 0.0, "rest_seconds": 0.0}
    assert nothing == {"samples_per_second": 0.0, **times, "slowest_rank": 0, "slowest_ratio": 1.0}


def test_it_can_be_read_within_an_epoch_and_after_a_loop_that_was_broken_off() -> None:
    strategy = unitrain.init(backend="single")
    throughput = strategy.add(Throughput())
    loader = strategy.dataloader(rows(64), global_batch_size=8)
    readings = []
    for number, _ in enumerate(loader):
        time.sleep(WAIT_S)
        if number % 2:
            readings.append(throughput.read())
        if number == 3:
            break
    assert [reading["rest_seconds"] >= 2 * WAIT_S for reading in readings] == [True, True]
    time.sleep(WAIT_S)
    assert throughput.read()["rest_seconds"] < WAIT_S


def measured() -> dict[str, float]:
    with unitrain.init(backend="ddp", device="cpu") as strategy:
        throughput = strategy.add(Throughput())
        rank = strategy.rank
        train(strategy, rows(20), epochs=2, busy=lambda: time.sleep(WAIT_S if rank == 1 else 0.0))
        return throughput.read()


@pytest.mark.alone
def test_all_ranks_read_what_they_did_together() -> None:
    one, other = run_ranks(measured)
    assert one == other
    # Rank 1 slept in each of 6 steps, and rank 0 waited for it in its own: each is half of the mean.
    assert one["rest_seconds"] >= 6 * WAIT_S / 2
    assert one["step_seconds"] >= 5 * WAIT_S / 2
    assert one["samples_per_second"] < 40 / (6 * WAIT_S)
    assert one["slowest_rank"] == 1
    assert one["slowest_ratio"] > 1.5
