"""Duties of starting, closing, and starting again in the same process."""

from __future__ import annotations

import threading

import torch

from unitrain.testing.duty import duty
from unitrain.testing.models import Twins
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
    threads = set(threading.enumerate())
    with world.open() as strategy:
        Twins(strategy).train(steps=1)
    left = set(threading.enumerate()) - threads
    for thread in left:
        # Threads may take a moment to end.
        thread.join(5)
    assert not [thread.name for thread in left if thread.is_alive()]
