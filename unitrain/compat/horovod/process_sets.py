"""Process sets: groups of ranks that run operations among themselves.

Operations are matched by name, in whichever order each rank has submitted them. Nothing runs in the background. An
operation is pending until its rank waits for it. Then the ranks compare their pending operations in a round, and run
those that all of them have, in the order of the names. If no rank can continue, because each waits for an operation
that another has not submitted, all of them raise an error that names these operations.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from reprlib import repr as shortened
from typing import Any, ClassVar, TypeVar

import torch

from unitrain.communication.communicator import Communicator
from unitrain.errors import CommunicationError, by_rank
from unitrain.rng import derived_seed

T = TypeVar("T")
Form = tuple[Any, ...]


class HorovodInternalError(CommunicationError, RuntimeError):
    """An operation that the ranks could not complete: they have submitted different ones, or a rank has gone."""


class Operation(Future[Any]):
    """An operation that a rank has submitted, and the handle by which it waits for it.

    Args:
        process_set: the ranks that take part.
        form: the arguments that must be the same on all ranks, as plain data.
        run: runs it on all ranks together, given their communicator, and returns its result.

    Attributes:
        back: returns the gradients of the tensors that were given, given the results' gradients.
    """

    back: Callable[..., Any]

    def __init__(self, process_set: ProcessSet, form: Form, run: Callable[[Communicator], Any]) -> None:
        super().__init__()
        self.process_set: ProcessSet = process_set
        self.form: Form = form
        self.run: Callable[[Communicator], Any] = run


class ProcessSet:
    """A group of ranks, for ``hvd.init(process_sets=...)`` or ``hvd.add_process_set``.

    Args:
        ranks: the ranks.

    Attributes:
        ranks: the ranks, in ascending order.
        process_set_id: its number; None before it is added, and after it is removed.
        joined: the ranks that have joined, in this order.
        stand_ins: for verbs, how a rank that has joined takes part in an operation of a name and form; not in others.
    """

    stand_ins: ClassVar[dict[str, Callable[[Communicator, str, Form], object]]] = {}

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks: list[int] = sorted(set(ranks))
        self.register(None, None)

    def register(self, number: int | None, communicator: Communicator | None) -> None:
        """Begin without operations, under a number.

        Args:
            number: the number; None to refuse operations from now on.
            communicator: of its ranks; None on other ranks.
        """
        self.process_set_id: int | None = number
        self._communicator = communicator
        self._pending: dict[str, Operation] = {}
        self._unnamed: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self.joined: list[int] = []

    @property
    def communicator(self) -> Communicator:
        """The communicator of its ranks. ValueError if this is none of them, or if it is not added."""
        if self._communicator is None:
            raise ValueError(f"this is none of the ranks {self.ranks}, or they were not added: call hvd.init() before.")
        return self._communicator

    def size(self) -> int | None:
        """Return the number of its ranks; None if it is not added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return the place of this process among its ranks; None if it is not added."""
        return None if self.process_set_id is None else self.communicator.rank

    def included(self) -> bool | None:
        """Return whether this process is one of its ranks; None if it is not added."""
        return None if self.process_set_id is None else self._communicator is not None

    def next_name(self, verb: str) -> str:
        """Return the name of the next operation of a verb that the script has given none."""
        return f"noname.{next(self._unnamed[verb])}"

    def submit(self, verb: str, name: str | None, form: Form, run: Callable[[Communicator], Any]) -> Operation:
        """Submit an operation. ValueError on other ranks, or if another one of its verb and name is pending."""
        _ = self.communicator  # ValueError if this is none of its ranks
        name = f"{verb}.{self.next_name(verb) if name is None else name}"
        if name in self._pending:
            raise ValueError(f"an operation named {name!r} is pending: synchronize it before, or use another name.")
        self._pending[name] = operation = Operation(self, form, run)
        return operation

    def call(self, verb: str, name: str | None, form: Form, run: Callable[[Communicator], T]) -> T:
        """Submit an operation, wait for it, and return its result.

        For calls that are built on the communicator, such as ``broadcast_object``: they can't meet another operation.
        """
        result: T = synchronize(self.submit(verb, name, form, run))
        return result

    def round(self, *, joins: bool = False) -> bool:
        """Run the operations that all ranks have submitted. Return whether all have joined. Collective.

        If no rank can continue, all pending operations get an error that names them.

        Args:
            joins: whether this rank has joined, and does not wait for an operation.
        """
        ranks = self.communicator
        forms = {name: self._pending[name].form for name in sorted(self._pending)}
        digest = torch.tensor(derived_seed(forms, joins) >> 1, device=ranks.device)
        equal = len(set(ranks.collectives.all_gather(digest).tolist())) == 1
        every = [(forms, joins)] * ranks.world_size if equal else ranks.all_gather_data((forms, joins))
        joined = [rank for rank, (_, joins) in enumerate(every) if joins]
        self.joined = sorted(joined, key=[*self.joined, *joined].index)
        ran = [name for name in sorted({name for forms, _ in every for name in forms}) if self._runs(name, every)]
        ended = not ran and len(joined) == ranks.world_size
        if not ran and not ended:
            shown = [", ".join(f"{name!r} {shortened(form)}" for name, form in forms.items()) for forms, _ in every]
            error = f"the ranks wait for different operations: {by_rank(enumerate(shown))}. All must submit the same."
            for operation in self._pending.values():
                operation.set_exception(HorovodInternalError(error))
            self._pending.clear()
        return ended

    def _runs(self, name: str, every: Sequence[tuple[dict[str, Form], bool]]) -> bool:
        """Run an operation if all ranks but those that have joined have it in one form, and these can join in it."""
        verb = name.partition(".")[0]
        first, *others = [forms.get(name) for forms, joins in every if name in forms or not joins]
        if any(form != first for form in others) or (len(others) + 1 < len(every) and verb not in self.stand_ins):
            return False
        if name not in self._pending:
            self.stand_ins[verb](self.communicator, name, first or ())
            return True
        operation = self._pending.pop(name)
        try:
            operation.set_result(operation.run(self.communicator))
        except Exception as error:  # is raised where the script waits: other operations must run meanwhile
            operation.set_exception(error)
        return True


global_process_set: ProcessSet = ProcessSet([])
"""The process set of all ranks."""
_numbers = itertools.count(1)


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set, and return it. All ranks call it, those that are not in the set too."""
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    others = [rank for rank in global_process_set.ranks if rank not in added.ranks]
    groups = [ranks for ranks in (added.ranks, others) if ranks]
    part = global_process_set.call("add_process_set", str(added.ranks), (), lambda world: world.part(groups))
    added.register(next(_numbers), part if global_process_set.rank() in added.ranks else None)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Return whether it was registered, and is not the global one. All ranks call it."""
    if not process_set.process_set_id:
        return False
    global_process_set.call("remove_process_set", str(process_set.ranks), (), lambda world: None)
    process_set.register(None, None)
    return True


def poll(handle: Operation) -> bool:
    """Wait for an operation, unlike Horovod's, and return True: nothing runs in the background."""
    while not handle.done():
        handle.process_set.round()
    return True


def synchronize(handle: Operation) -> Any:
    """Wait for an operation, and return its result: a tuple for several tensors.

    Raises:
        HorovodInternalError: the ranks don't agree on it, or it has failed because of another rank.
    """
    poll(handle)
    try:
        return handle.result()
    except CommunicationError as error:
        raise HorovodInternalError(str(error)) from error


def join(device: int = -1) -> int:
    """Take part in the reductions of other ranks, with zeros, until all have joined. Return the rank that was last.

    Args:
        device: ignored: the zeros are where the ranks communicate.
    """
    while not global_process_set.round(joins=True):
        pass
    return global_process_set.joined[-1]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of a process set has called it."""
    process_set.call("barrier", None, (), lambda ranks: None)
