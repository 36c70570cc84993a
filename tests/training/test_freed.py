"""What a script drops is freed: models, optimizers and strategies, with their descriptors and threads."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

import pytest
import torch
from needs import HOROVOD
from ranks import on_ranks
from torch import nn

import unitrain


def fold(strategy: unitrain.Strategy) -> list[weakref.ref[Any]]:
    """Train a model for two steps, and drop it. Return references to what must be freed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("constant", torch.ones(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    dropped: list[weakref.ref[Any]] = [weakref.ref(model), weakref.ref(model[0].weight), weakref.ref(optimizer)]
    wrapped, optimizer = strategy.prepare(model, optimizer)
    for batch in strategy.dataloader(torch.arange(32.0).view(8, 4), global_batch_size=4):
        strategy.step(wrapped(batch).square().mean(), optimizer, scheduler)
    return dropped


def alive(references: list[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


def folds_in_one_strategy(backend: str, **settings: Any) -> int:
    with unitrain.init(backend=backend, device="cpu", timeout_s=30, **settings) as strategy:
        dropped = [reference for _ in range(4) for reference in fold(strategy)]
        strategy.prepare(nn.Linear(1, 1))  # here the ranks agree on what all of them have dropped
        return alive(dropped)


def folds_in_strategies(backend: str, rounds: int) -> list[int]:
    """Return how many objects, descriptors and threads are left."""
    dropped, before = [], [0, 0]
    for number in range(rounds + 1):
        strategy = unitrain.init(backend=backend, device="cpu", timeout_s=30)
        dropped += [weakref.ref(strategy), *fold(strategy)]
        strategy.close()
        del strategy
        if not number:
            alive(dropped)
            before = [len(os.listdir("/proc/self/fd")), threading.active_count()]
    left = alive(dropped)
    return [left, len(os.listdir("/proc/self/fd")) - before[0], threading.active_count() - before[1]]


def test_fifty_strategies_leave_nothing() -> None:
    assert folds_in_strategies("single", 50) == [0, 0, 0]


def test_a_strategy_frees_what_the_script_has_dropped() -> None:
    assert folds_in_one_strategy("single") == 0


@pytest.mark.parametrize("backend", ["ddp", pytest.param("horovod", marks=HOROVOD)])
@on_ranks()
def test_process_groups_are_freed(backend: str) -> None:
    assert folds_in_strategies(backend, 3) == [0, 0, 0]


@pytest.mark.parametrize(
    ("backend", "sharded"), [("ddp", False), ("ddp", True), pytest.param("horovod", False, marks=HOROVOD)]
)
@on_ranks()
def test_ranks_free_what_all_of_them_have_dropped(backend: str, sharded: bool) -> None:
    assert folds_in_one_strategy(backend, shard_optimizer=sharded) == 0


@on_ranks()
def test_a_layer_that_the_script_keeps_stays_prepared() -> None:
    """A module is dropped on one rank, and a part of it on none. The part, which has a moving buffer, is trained."""
    with unitrain.init(backend="ddp", device="cpu", timeout_s=30, deterministic=True) as strategy:
        both = nn.ModuleList([nn.BatchNorm1d(2), nn.Linear(2, 1)])
        part = both[1]
        seen = torch.zeros(())
        part.register_buffer("seen", seen)
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        strategy.prepare(both, optimizer)
        kept = both if strategy.is_main else None
        del both
        strategy.prepare(nn.Linear(1, 1))
        for _ in range(3):
            seen += 1 + strategy.rank
            strategy.step(part(torch.ones(2, 2)).mean(), optimizer)
        strategy.check_in_sync(part)
        assert (float(seen), kept is not None) == (3.0, strategy.is_main)
