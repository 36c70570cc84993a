"""The life of a job, and the place of this process in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unitrain.compat.horovod.process_sets import ProcessSet
from unitrain.strategy import Strategy


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the other processes, unless this has been done. Collective."""
    raise NotImplementedError


def shutdown() -> None:
    """Leave the job. Operations that other ranks still wait for fail there."""
    raise NotImplementedError


def strategy() -> Strategy:
    """Return the strategy that ``init`` has made. ValueError before that."""
    raise NotImplementedError


def is_initialized() -> bool:
    """Return whether this process has joined a job."""
    raise NotImplementedError


def rank() -> int:
    """Return the rank of this process."""
    raise NotImplementedError


def size() -> int:
    """Return the number of processes."""
    raise NotImplementedError


def local_rank() -> int:
    """Return the rank of this process among those of its host."""
    raise NotImplementedError


def local_size() -> int:
    """Return the number of processes of this host."""
    raise NotImplementedError


def cross_rank() -> int:
    """Return the rank of this process's host among those that have a process of this local rank."""
    raise NotImplementedError


def cross_size() -> int:
    """Return the number of hosts that have a process of this local rank."""
    raise NotImplementedError


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of processes."""
    raise NotImplementedError
