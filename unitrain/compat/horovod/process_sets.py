"""Process sets: groups of ranks that run operations among themselves."""

from __future__ import annotations

from collections.abc import Iterable

from unitrain.compat.horovod.matching import Queue


class ProcessSet:
    """A group of ranks for ``hvd.init(process_sets=…)`` or ``hvd.add_process_set``.

    Args:
        ranks: the ranks.

    Attributes:
        ranks: the ranks, in ascending order.
        process_set_id: its number; None before it is added, and after it is removed.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks: list[int] = sorted(ranks)
        self.process_set_id: int | None = None
        self._queue: Queue | None = None

    def size(self) -> int | None:
        """Return the number of its ranks; None if it is not added."""
        raise NotImplementedError

    def rank(self) -> int | None:
        """Return the place of this process among its ranks; None if it is not added."""
        raise NotImplementedError

    def included(self) -> bool | None:
        """Return whether this process is one of its ranks; None if it is not added."""
        raise NotImplementedError

    def queue(self) -> Queue:
        """Return the operations that this rank has submitted to it."""
        raise NotImplementedError


global_process_set = ProcessSet([])
"""The process set of all ranks."""


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Add a process set, and return it. Collective over all ranks."""
    raise NotImplementedError


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Return whether there was one to remove. Collective over all ranks."""
    raise NotImplementedError
