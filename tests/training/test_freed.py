"""What a script drops is freed: models, optimizers and strategies, with their descriptors and threads."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from needs import FSDP, HOROVOD
from ranks import run_ranks
from torch import nn

import unitrain
from unitrain import UsageError
from unitrain.testing.models import step_by_hand


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


def test_process_groups_are_freed() -> None:
    assert run_ranks(folds_in_strategies, "ddp", 3) == [[0, 0, 0]] * 2


def free_with_ranks() -> list[int]:
    return [folds_in_one_strategy("ddp"), folds_in_one_strategy("ddp", shard_optimizer=True)]


def test_ranks_free_what_all_of_them_have_dropped() -> None:
    assert run_ranks(free_with_ranks) == [[0, 0]] * 2


@FSDP
def test_shards_are_freed() -> None:
    assert run_ranks(folds_in_one_strategy, "fsdp") == [0, 0]


@HOROVOD
def test_horovod_s_buckets_are_freed() -> None:
    assert run_ranks(folds_in_one_strategy, "horovod", launcher="horovodrun") == [0, 0]


def keep_a_layer() -> list[Any]:
    """Drop a prepared module on one rank, and a part of it on none. Train the part, which has a moving buffer."""
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
        return [float(seen), kept is not None]


def test_a_layer_that_the_script_keeps_stays_prepared() -> None:
    assert run_ranks(keep_a_layer) == [[3.0, True], [3.0, False]]


def drop_after_a_backward(backend: str, **settings: Any) -> list[Any]:
    """Drop an optimizer between backward and update, on rank 0 later than on the others, and train with another one."""
    with unitrain.init(backend=backend, device="cpu", precision="fp64", timeout_s=30, **settings) as strategy:
        torch.manual_seed(0)
        plain = (net := nn.Linear(3, 2).double()).weight.detach().clone().requires_grad_()
        data = torch.arange(12.0, dtype=torch.float64).view(4, 3) / 12
        rows = data[strategy.rank :: strategy.world_size]
        model, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        strategy.backward(model(rows).sum(), optimizer)
        kept = optimizer if strategy.is_main else None
        del optimizer
        other = strategy.prepare(torch.optim.SGD([net.weight], lr=0.3))
        reference = torch.optim.SGD([plain], lr=0.3)
        for _ in range(2):
            strategy.step(model(rows).square().mean(), other)
            step_by_hand((data @ plain.t() + net.bias.detach()).square().mean(), reference)
        said = ""
        if kept is not None and strategy.world_size > 1:
            with pytest.raises(UsageError) as raised:
                strategy.update(kept)
            said = str(raised.value)
        return [float((strategy.full_tensor(net.weight.detach()) - plain.detach()).abs().max()) < 1e-12, said]


@pytest.mark.parametrize(
    ("backend", "settings"), [("ddp", {"deterministic": True}), pytest.param("horovod", {}, marks=HOROVOD)]
)
def test_an_optimizer_that_is_dropped_between_backward_and_update(backend: str, settings: dict[str, Any]) -> None:
    launcher: Any = "horovodrun" if backend == "horovod" else "spawn"
    (right, said), second = run_ranks(partial(drop_after_a_backward, backend, **settings), launcher=launcher)
    assert right
    assert second == [True, ""]
    assert said.endswith("or another rank has dropped this optimizer.")
