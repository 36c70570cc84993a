"""Matches the operations of the ranks by name, in whichever order each rank has submitted them.

Nothing runs in the background. An operation is queued until its rank waits for it. Then the ranks compare their queues
in a round, and run what all of them have, in the order of the names. If no rank can continue, because each
waits for what another has not submitted, all of them raise an error that names these operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Any, TypeVar

import torch

from unitrain.communication.communicator import Communicator
from unitrain.errors import CommunicationError, by_rank
from unitrain.rng import derived_seed

Form = tuple[Any, ...]
T = TypeVar("T")
STAND_INS: dict[str, Callable[[Communicator, str, Form], object]] = {}
"""For verbs, what a rank that has joined calls to take part in an operation of a name and form; not in other verbs."""


class HorovodInternalError(CommunicationError, RuntimeError):
    """An operation that the ranks could not complete: they have submitted different ones, or a rank has gone."""


@dataclass(eq=False)
class Operation:
    """An operation that a rank submits, and the handle by which it waits for it.

    Attributes:
        queue: the queue that it is in.
        form: what must be the same on all ranks, as plain data.
        run: runs it on all ranks together, given their communicator, and returns its result.
        result: the result, once it was run.
        error: why it has failed; None if it has not.
        done: whether it was run, or has failed.
    """

    queue: Queue
    form: Form
    run: Callable[[Communicator], Any]
    result: Any = None
    error: Exception | None = None
    done: bool = False


class Queue:
    """The operations of a process set that this rank has submitted, and not all ranks have run.

    Args:
        communicator: of the ranks of the process set.

    Attributes:
        communicator: as the argument.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._pending: dict[str, Operation] = {}
        self._unnamed: dict[str, int] = {}
        self._joined: set[int] = set()
        self._last_joined = -1

    def next_name(self, verb: str) -> str:
        """Return the name of the next operation of a verb that the script has given none."""
        self._unnamed[verb] = number = self._unnamed.get(verb, 0) + 1
        return f"noname.{number}"

    def submit(self, verb: str, name: str | None, form: Form, run: Callable[[Communicator], Any]) -> Operation:
        """Queue an operation. ValueError if another one of its verb and name is in the queue."""
        name = f"{verb}.{self.next_name(verb) if name is None else name}"
        if name in self._pending:
            raise ValueError(
                f"an operation named {name!r} was submitted while another of this name has not been "
                "synchronized: give it another name, or call hvd.synchronize with the first one's handle before."
            )
        self._pending[name] = operation = Operation(self, form, run)
        return operation

    def finish(self, operation: Operation) -> Any:
        """Wait for an operation, and return its result.

        Raises:
            HorovodInternalError: the ranks don't agree on it, or it has failed because of another rank.
        """
        self.poll(operation)
        if isinstance(operation.error, CommunicationError):
            raise HorovodInternalError(str(operation.error)) from operation.error
        if operation.error is not None:
            raise operation.error
        return operation.result

    def call(self, verb: str, name: str | None, form: Form, run: Callable[[Communicator], T]) -> T:
        """Submit an operation, wait for it, and return its result.

        For what is built on the communicator, such as ``broadcast_object``: so it can't meet another operation.
        """
        result: T = self.finish(self.submit(verb, name, form, run))
        return result

    def poll(self, operation: Operation) -> bool:
        """Wait for an operation, and return True."""
        while not operation.done:
            self._round()
        return True

    def join(self) -> int:
        """Take part in the reductions of other ranks until all have joined. Return the rank that was the last."""
        while not self._round(joins=True):
            pass
        self._joined.clear()
        return self._last_joined

    def _round(self, *, joins: bool = False) -> bool:
        """Run the operations that all ranks have submitted. Return whether all have joined. Collective.

        Args:
            joins: whether this rank has joined, and does not wait for an operation.

        Raises:
            HorovodInternalError: this rank has joined, and another one will not.
        """
        ranks = self.communicator
        forms = {name: self._pending[name].form for name in sorted(self._pending)}
        facts = torch.tensor([derived_seed(forms) >> 1, joins], device=ranks.device)
        digests, joining = ranks.collectives.all_gather(facts).T.tolist()
        if len(set(digests)) == 1 and not any(joining):
            for name in forms:
                self._run(name)
            return False
        joined = {rank for rank, joins in enumerate(joining) if joins}
        self._last_joined, self._joined = max(joined - self._joined, default=self._last_joined), joined
        every: list[dict[str, Form]] = ranks.all_gather_data(forms)
        names = sorted(set().union(*every))
        ready = [name for name in names if all(name in every[rank] or rank in joined for rank in range(len(every)))]
        for name in ready:
            self._run_if_equal(name, [(rank, forms[name]) for rank, forms in enumerate(every) if name in forms])
        if not ready and len(joined) < len(every):  # all wait, and none can submit more
            shown = [", ".join(map(repr, [*forms][:3])) or "nothing, as it has joined" for forms in every]
            error = f"the ranks wait for different operations: {by_rank(enumerate(shown))}. All must submit the same."
            for name in forms:
                self._fail(name, error)
            if joins:
                raise HorovodInternalError(error)
        return not ready and len(joined) == len(every)

    def _run_if_equal(self, name: str, forms: Sequence[tuple[int, Form]]) -> None:
        """Run an operation that all ranks have but those that have joined, unless its forms on these ranks differ."""
        verb, _, _ = name.partition(".")
        _, form = forms[0]
        if any(other != form for _, other in forms):
            text = by_rank((rank, shortened(form)) for rank, form in forms)
            self._fail(name, f"the operations named {name!r} differ: {text}. Give them different names.")
        elif len(forms) < self.communicator.world_size and verb not in STAND_INS:
            self._fail(name, f"{verb} does not work after hvd.join, but {name!r} was called, and ranks have joined.")
        elif name in self._pending:
            self._run(name)
        else:
            STAND_INS[verb](self.communicator, name, form)

    def _run(self, name: str) -> None:
        operation = self._pending.pop(name)
        try:
            operation.result = operation.run(self.communicator)
        except Exception as error:  # is raised where the script waits: other operations must run meanwhile
            operation.error = error
        operation.done = True

    def _fail(self, name: str, error: str) -> None:
        if name in self._pending:  # not on a rank that has joined
            operation = self._pending.pop(name)
            operation.error, operation.done = HorovodInternalError(error), True
