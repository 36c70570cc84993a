"""Matches the operations of the ranks by name, in whichever order each rank has submitted them.

Nothing runs in the background. An operation is queued until its rank waits for it, or polls it. Then the ranks compare
their queues in a round, and start what all of them have, in the order of the names. If no rank can continue, because
each waits for what another has not submitted, all of them raise an error that names these operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from unitrain.communication.communicator import Communicator
from unitrain.errors import CommunicationError, by_rank
from unitrain.rng import derived_seed

_WAITS, _POLLS, _JOINED, _ENDS = range(4)  # why a rank takes part in a round
_FUSED_BYTES = 2**24  # larger tensors are not copied
Form = tuple[Any, ...]


class HorovodInternalError(CommunicationError, RuntimeError):
    """An operation that the ranks could not complete: they have submitted different ones, or a rank has gone."""


@dataclass(eq=False)
class Operation:
    """An operation that a rank has submitted.

    Attributes:
        name: by which the ranks match it.
        form: what must be the same on all ranks, as plain data: the verb, and of a tensor dtype, shape and device.
        start: starts operations that can be fused, given the communicator, a name for the backend, and for each rank
            the sizes of the first. Returns a function that waits, and returns their results.
        tensor: the input.
        output: where the result goes, and what is returned; None if ``start`` makes it.
        sizes: what may differ between the ranks, and all of them must know: numbers of rows.
        fused: what operations have in common that can be fused; None for those that can't.
        wait: waits for the result, and returns it; None before the start.
        error: why it has failed; "" if it has not.
    """

    name: str
    form: Form
    start: Callable[[Communicator, str, Sequence[Operation], Sequence[Sequence[int]]], Callable[[], Sequence[Any]]]
    tensor: Tensor = field(default_factory=lambda: torch.empty(0))
    output: Tensor | None = None
    sizes: Sequence[int] = ()
    fused: Form | None = None
    wait: Callable[[], Any] | None = None
    error: str = ""

    @property
    def settled(self) -> bool:
        """Whether it was started, or has failed."""
        return self.wait is not None or bool(self.error)


class Queue:
    """The operations of a process set that this rank has submitted, and not all ranks have started.

    Args:
        communicator: of the ranks of the process set.
        stand_ins: for verbs, what returns the operation by which a rank that has joined takes part in one of a name and
            form. For others, it can't.

    Attributes:
        communicator: as above.
    """

    def __init__(
        self, communicator: Communicator, stand_ins: Mapping[str, Callable[[str, Form], Operation | None]]
    ) -> None:
        self.communicator = communicator
        self._stand_ins = stand_ins
        self._pending: dict[str, Operation] = {}
        self._unnamed: dict[str, int] = {}
        self._started = 0
        self._joined: set[int] = set()
        self._last_joined = -1

    def name(self, verb: str) -> str:
        """Return the name of the next operation of a verb that the script has given none."""
        self._unnamed[verb] = number = self._unnamed.get(verb, 0) + 1
        return f"{verb}.noname.{number}"

    def submit(self, operation: Operation) -> None:
        """Queue an operation. ValueError if another one of its name waits to be started."""
        if operation.name in self._pending:
            raise ValueError(
                f"an operation named {operation.name!r} was submitted while another of this name has not been "
                "synchronized: give it another name, or call hvd.synchronize with the first one's handle before."
            )
        self._pending[operation.name] = operation

    def finish(self, operation: Operation) -> Any:
        """Wait for an operation, and return its result.

        Raises:
            HorovodInternalError: the ranks don't agree on it, or it has failed because of another rank.
        """
        while not operation.settled:
            self._round(_WAITS)
        if operation.wait is None:
            raise HorovodInternalError(operation.error)
        try:
            with self.communicator.collectives.pulse.within(operation.form[0]):
                return operation.wait()
        except RuntimeError as error:
            raise HorovodInternalError(f"{_described(operation.name, operation.form)} failed: {error}") from error

    def call(self, name: str, form: Form, function: Callable[[Communicator], Any]) -> Any:
        """Return the result of a function that calls collectives, once all ranks have come to it by its name."""
        operation = Operation(name, form, lambda communicator, *_: lambda: [function(communicator)])
        self.submit(operation)
        return self.finish(operation)

    def poll(self, operations: Sequence[Operation]) -> bool:
        """Return whether operations have been started or have failed, after a round with the other ranks if not."""
        if not all(operation.settled for operation in operations):
            self._round(_POLLS)
        return all(operation.settled for operation in operations)

    def join(self) -> int:
        """Take part in the reductions of other ranks until all have joined. Return the rank that was the last."""
        while not self._round(_JOINED):
            pass
        self._joined.clear()
        return self._last_joined

    def end(self) -> None:
        """Return when all ranks end. What a rank still waits for fails there."""
        while not self._round(_ENDS):
            pass

    def _round(self, state: int) -> bool:
        """Start what all ranks have submitted. Return whether all have joined, or all end. Collective.

        Raises:
            HorovodInternalError: this rank has joined, and another will not.
        """
        collectives = self.communicator.collectives
        forms = {name: self._pending[name].form for name in sorted(self._pending)}
        facts = torch.tensor([derived_seed(forms) >> 1, state], device=collectives.device)
        digests, states = collectives.all_gather(facts).T.tolist()
        if len(set(digests)) == 1 and max(states) <= _POLLS:
            self._start(list(forms))
            return False
        joined = {rank for rank, its in enumerate(states) if its == _JOINED}
        self._last_joined = max(joined - self._joined, default=self._last_joined)
        self._joined = joined
        all_forms: list[dict[str, Form]] = self.communicator.all_gather_data(forms)
        ready = list(self._agreed(all_forms))
        if ready:
            self._start([name for name in ready if not self._failed(name)])
        elif min(states) == max(states) >= _JOINED:
            return True
        elif _POLLS not in states:
            self._give_up(states, all_forms)
        return False

    def _agreed(self, forms_of_all: list[dict[str, Form]]) -> Iterator[str]:
        """Yield the names of the operations that every rank has, or has joined for. Those that differ have failed."""
        for name in sorted(set().union(*forms_of_all)):
            forms = {rank: forms[name] for rank, forms in enumerate(forms_of_all) if name in forms}
            absent = set(range(len(forms_of_all))) - forms.keys()
            if absent - self._joined:
                continue
            yield name
            form = next(iter(forms.values()))
            stand_in = self._stand_ins[form[0]](name, form) if absent and form[0] in self._stand_ins else None
            if self.communicator.rank in absent and stand_in is not None:
                self._pending[name] = stand_in
            if name not in self._pending:
                continue
            if any(other != form for other in forms.values()):
                described = by_rank((rank, _described(form[0], form)) for rank, form in forms.items())
                self._pending[name].error = (
                    f"the ranks have submitted different operations named {name!r}: {described}. All must submit the "
                    "same, or give them different names."
                )
            elif absent and stand_in is None:
                self._pending[name].error = f"{form[0]} {name!r} does not work after another rank has called hvd.join."

    def _failed(self, name: str) -> bool:
        """Return whether an operation has failed, and forget it then; or whether this rank does not have it."""
        if name in self._pending and self._pending[name].error:
            del self._pending[name]
        return name not in self._pending

    def _give_up(self, states: Sequence[int], forms_of_all: list[dict[str, Form]]) -> None:
        """Let all that the ranks wait for fail, since no rank can submit what another waits for."""
        reasons = {_JOINED: "nothing, after hvd.join", _ENDS: "nothing, after hvd.shutdown or at the end of its script"}
        waiting = (
            (rank, reasons.get(state) or ", ".join(_described(*item) for item in list(forms.items())[:3]))
            for rank, (state, forms) in enumerate(zip(states, forms_of_all, strict=True))
        )
        error = f"the ranks wait for different operations: {by_rank(waiting)}. All must submit the same ones."
        for operation in self._pending.values():
            operation.error = error
        self._pending.clear()
        if states[self.communicator.rank] == _JOINED:
            raise HorovodInternalError(error)

    def _start(self, names: Sequence[str]) -> None:
        """Start operations that all ranks have, in the same order on each. Collective."""
        operations = [self._pending.pop(name) for name in names]
        collectives = self.communicator.collectives
        sizes = [size for operation in operations for size in operation.sizes]
        every = collectives.all_gather(torch.tensor(sizes, device=collectives.device)).tolist() if sizes else []
        first = 0
        for batch in _batches(operations):
            last = first + len(batch[0].sizes)
            self._started += 1
            wait = cache(
                batch[0].start(self.communicator, f"hvd.{self._started}", batch, [row[first:last] for row in every])
            )
            first = last
            for number, operation in enumerate(batch):
                operation.wait = partial(_result, wait, number)


def _result(wait: Callable[[], Sequence[Any]], number: int) -> Any:
    return wait()[number]


def _batches(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Return operations in groups of those that are fused."""
    batches: list[list[Operation]] = []
    size = 0
    for operation in operations:
        size += operation.tensor.nbytes
        if batches and operation.fused and operation.fused == batches[-1][0].fused and size <= _FUSED_BYTES:
            batches[-1].append(operation)
        else:
            batches.append([operation])
            size = operation.tensor.nbytes
    return batches


def _described(name: str, form: Form) -> str:
    """Return an operation as text for a message."""
    if len(form) < 4:
        return repr(name)
    _, dtype, shape, *more = form
    return f"{name!r} of {dtype}{list(shape)} ({', '.join(map(str, more))})"
