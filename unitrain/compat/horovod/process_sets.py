"""Process sets: groups of ranks that run operations among themselves."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from unitrain.communication.communicator import Communicator
from unitrain.compat.horovod.matching import Queue

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


class ProcessSet:
    """A group of ranks, for ``hvd.init(process_sets=...)`` or ``hvd.add_process_set``.

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

    def open(self, number: int, communicator: Communicator | None) -> None:
        """Register it under a number, with the communicator of its ranks; with None on other ranks."""
        self.process_set_id = number
        self._queue = None if communicator is None else Queue(communicator)

    def close(self) -> None:
        """Refuse operations from now on."""
        self.process_set_id = self._queue = None

    def size(self) -> int | None:
        """Return the number of its ranks; None if it is not added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return the place of this process among its ranks; None if it is not added."""
        return None if self.process_set_id is None else self.queue().communicator.rank

    def included(self) -> bool | None:
        """Return whether this process is one of its ranks; None if it is not added."""
        return None if self.process_set_id is None else self._queue is not None

    def queue(self) -> Queue:
        """Return the operations that this rank has submitted to it. ValueError if this is none of its ranks."""
        if self._queue is None:
            if global_process_set.process_set_id is None:
                raise ValueError(NOT_INITIALIZED)
            raise ValueError(
                f"rank {global_process_set.rank()} called an operation of the process set of ranks {self.ranks}: call "
                "it on these ranks only, and pass the set to hvd.init or hvd.add_process_set before."
            )
        return self._queue


global_process_set: ProcessSet = ProcessSet([])
"""The process set of all ranks."""
registered: dict[tuple[int, ...], ProcessSet] = {}
"""The other process sets, by their ranks."""
_numbers = itertools.count(1)


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set, and return it. All ranks call it, those that are not in the set too.

    Raises:
        ValueError: there is no such rank, or a process set of these ranks.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    queue, ranks, every = global_process_set.queue(), added.ranks, global_process_set.ranks
    others = sorted(set(every) - set(ranks))
    if not ranks or len(ranks) + len(others) != len(every):
        raise ValueError(f"the ranks of a process set must be different ones of 0 to {every[-1]}, but are {ranks}.")
    if not others or tuple(ranks) in registered:
        raise ValueError(f"there is a process set of ranks {ranks} already: use it.")
    communicator = queue.call("add_process_set", str(ranks), (), lambda world: world.part([ranks, others]))
    added.open(next(_numbers), communicator if queue.communicator.rank in ranks else None)
    registered[tuple(ranks)] = added
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Return whether it was registered, and is not the global one. All ranks call it."""
    if not process_set.process_set_id:
        return False
    ranks, queue = process_set.ranks, global_process_set.queue()
    queue.call("remove_process_set", str(ranks), (), lambda world: registered.pop(tuple(ranks)).close())
    return True
