"""Duties of starting, closing, and starting again in the same process."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn.functional import mse_loss

from unitrain import UsageError
from unitrain.testing.duty import duty
from unitrain.testing.models import Net, flat, local, sgd, two_rows_each
from unitrain.testing.worlds import World


@duty()
def starts_as_often_as_asked(world: World) -> None:
    """A process can start the backend again after closing it, with other settings."""
    for settings in ({}, {"deterministic": True}, {"precision": "fp32", "timeout_s": 20}):
        with world.open(**settings) as strategy:
            assert (strategy.config.backend, strategy.world_size) == (world.backend, world.processes)
            assert float(strategy.all_reduce(torch.ones(()))) == strategy.world_size


@duty()
def leaves_no_thread_behind(world: World) -> None:
    """Threads that a strategy starts end when it is closed."""
    world.open().close()  # some libraries are started once in a process, and end with it
    before = set(threading.enumerate())
    with world.open() as strategy:
        model = Net()
        prepared, optimizer = strategy.prepare(model, sgd(model))
        inputs, targets, mine = two_rows_each(strategy)
        strategy.step(mse_loss(prepared(inputs[mine]), targets[mine]), optimizer)
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(5)
    assert not [thread.name for thread in left if thread.is_alive()]


@duty()
def nothing_after_close(world: World) -> None:
    """A closed strategy raises an error for calls that would otherwise act on one rank only."""
    with world.open() as strategy:
        model = Net()
        prepared, optimizer = strategy.prepare(model, sgd(model))
    before = flat(model, local)
    with pytest.raises(UsageError, match=r"was called after strategy\.close\(\)"):
        strategy.step(prepared(torch.ones(2, 4, dtype=torch.float64)).sum(), optimizer)
    assert torch.equal(flat(model, local), before)
    if strategy.world_size > 1:
        with pytest.raises(UsageError, match=r"all_reduce was called after strategy\.close\(\)"):
            strategy.all_reduce(torch.ones(1))
