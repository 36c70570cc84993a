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
from ranks import run_ranks
from torch import nn

import unitrain

ROUNDS = 50


def fold(strategy: unitrain.Strategy) -> list[weakref.ref[Any]]:
    """Train a model of a layer with a moving buffer, and drop it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    dropped = [weakref.ref(thing) for thing in (model, model[0].weight, optimizer)]
    model, optimizer = strategy.prepare(model, optimizer)
    for batch in strategy.dataloader(torch.randn(8, 4), global_batch_size=4):
        strategy.step(model(batch).square().mean(), optimizer, scheduler)
    return dropped


def alive(references: list[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


def in_one_strategy(backend: str, **settings: Any) -> tuple[int, int]:
    with unitrain.init(backend=backend, device="cpu", timeout_s=30, **settings) as strategy:
        dropped = [reference for _ in range(8) for reference in fold(strategy)]
        strategy.prepare(nn.Linear(1, 1))  # here the ranks agree on what all of them have dropped
        within = alive(dropped)
    return within, alive(dropped)


def in_strategies(backend: str, rounds: int) -> list[int]:
    dropped = []
    for number in range(rounds):
        strategy = unitrain.init(backend=backend, device="cpu", timeout_s=30)
        dropped += [weakref.ref(strategy), *fold(strategy)]
        strategy.close()
        del strategy
        if not number:
            gc.collect()
            first = len(os.listdir("/proc/self/fd")), threading.active_count()
    freed = alive(dropped)
    return [freed, len(os.listdir("/proc/self/fd")) - first[0], threading.active_count() - first[1]]


def test_fifty_rounds_leave_nothing() -> None:
    assert in_strategies("single", ROUNDS) == [0, 0, 0]
    assert in_one_strategy("single") == (0, 0)


def test_process_groups_are_freed_as_well() -> None:
    assert run_ranks(in_strategies, "ddp", 12) == [[0, 0, 0]] * 2


@pytest.mark.parametrize("settings", [{}, {"shard_optimizer": True}])
def test_ranks_free_what_all_of_them_have_dropped(settings: dict[str, Any]) -> None:
    assert run_ranks(lambda_free(settings), nprocs=2) == [(0, 0)] * 2
