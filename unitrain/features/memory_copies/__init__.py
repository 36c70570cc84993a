"""Copies of a run's state in the memory of its hosts, from which a killed job resumes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unitrain.config import StrategyConfig

if TYPE_CHECKING:
    from unitrain.checkpoint import Checkpoint
    from unitrain.training.loop.sockets import Sockets


def wanted(config: StrategyConfig) -> bool:
    """Return True: without copies, those of an earlier start must not come back."""
    return True


def plug_in(sockets: Sockets) -> None:
    """Plug in nothing: there are copies while a checkpoint is open."""


def attach(checkpoint: Checkpoint, sockets: Sockets) -> None:
    """Copy the states of a checkpoint from now on."""
    from unitrain.job.job import current

    from .copies import MemoryCopies

    job = current()
    key = None if job is None or job.watch is None else job.watch.key
    copies = MemoryCopies(checkpoint, sockets, key)
    checkpoint.add_hook(copies)
    sockets.hooks.add_hook(copies)
