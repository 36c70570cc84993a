"""Process sets: groups of ranks that run operations among themselves."""

from __future__ import annotations

from collections.abc import Iterable

from unitrain.communication.communicator import Communicator
from unitrain.compat.horovod.matching import Queue
from unitrain.compat.horovod.operations import STAND_INS
from unitrain.errors import UsageError

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
        if not isinstance(ranks, Iterable):
            raise UsageError("a ProcessSet is made of a list of ranks here, not of an MPI communicator.")
        self.ranks: list[int] = sorted(ranks)
        self.process_set_id: int | None = None
        self._queue: Queue | None = None

    def open(self, number: int, communicator: Communicator | None) -> None:
        """Register it under a number, with the communicator of its ranks; with None on other ranks."""
        self.process_set_id = number
        self._queue = None if communicator is None else Queue(communicator, STAND_INS)

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
            which = f"the process set of ranks {self.ranks}"
            if self.process_set_id is None:
                raise ValueError(f"{which} is not registered: pass it to hvd.init or hvd.add_process_set before.")
            raise ValueError(f"rank {global_process_set.rank()} is not in {which}: call this on these ranks only.")
        return self._queue

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
"""The process set of all ranks."""
_registered: list[ProcessSet] = [global_process_set]


def open_global(communicator: Communicator) -> None:
    """Register the process set of all ranks."""
    global_process_set.ranks = list(range(communicator.world_size))
    global_process_set.open(0, communicator)


def close_all() -> None:
    """Close all process sets."""
    for process_set in _registered:
        process_set.close()
    _registered[:] = [global_process_set]


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set, and return it. All ranks call it, those that are not in the set too.

    Raises:
        ValueError: there is no such rank, or a process set of these ranks.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    queue, ranks = global_process_set.queue(), added.ranks
    others = sorted(set(global_process_set.ranks) - set(ranks))
    if not ranks or len(ranks) + len(others) != len(global_process_set.ranks):
        last = queue.communicator.world_size - 1
        raise ValueError(f"the ranks of a process set must be different ones of 0 to {last}, but are {ranks}.")
    if any(known.ranks == ranks and known.process_set_id is not None for known in _registered):
        raise ValueError(f"there is a process set of ranks {ranks} already: use it.")
    name = f"add_process_set {ranks}"
    communicator = queue.call(name, (name,), lambda every: every.part([ranks, others]))
    added.open(len(_registered), communicator if queue.communicator.rank in ranks else None)
    _registered.append(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Return whether it was registered, and is not the global one. All ranks call it."""
    if not process_set.process_set_id:
        return False
    name = f"remove_process_set {process_set.ranks}"
    global_process_set.queue().call(name, (name,), lambda every: process_set.close())
    return True
