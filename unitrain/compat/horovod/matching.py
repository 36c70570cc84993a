"""Matches the operations of the ranks by name, in whichever order each rank has submitted them.

Nothing runs in the background. An operation is queued until its rank waits for it, or polls it. Then the ranks compare
their queues in a round, and start what all of them have, in the order of the names. If no rank can continue, because
each waits for what another has not submitted, all of them raise an error that names these operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from unitrain.communication.communicator import Communicator
from unitrain.errors import CommunicationError, by_rank
from unitrain.rng import derived_seed

Form = tuple[Any, ...]
Sizes = Sequence[Sequence[int]]
Start = Callable[[Communicator, str, Sequence[Tensor], Sequence[Tensor], Sizes], Callable[[], Sequence[Any]]]
_FUSED_BYTES = 2**24  # larger tensors are not worth a copy
_WAITS, _POLLS, _JOINED, _ENDS = range(4)  # why a rank takes part in a round
_WAITS_FOR_NOTHING = {_JOINED: "nothing, as it has joined", _ENDS: "nothing, as it has shut down or ended"}


class HorovodInternalError(CommunicationError, RuntimeError):
    """An operation that the ranks could not complete: they have submitted different ones, or a rank has gone."""


@dataclass(eq=False)
class Operation:
    """An operation that a rank submits.

    Attributes:
        name: by which the ranks match it.
        form: what must be the same on all ranks, as plain data: the verb, and of each tensor dtype, shape and device.
        start: starts it, given the communicator, a label for the backend, tensors, outputs, and the ``sizes`` of each
            rank. Returns a function that waits, and returns a result for each tensor.
        tensors: the input.
        outputs: where the results go, if there are tensors for them before the start.
        single: whether the result is the one of the only tensor, and not a tuple.
        fuses: whether it may be started together with others, on the tensors of all.
        sizes: what may differ between the ranks, and all of them must know: numbers of rows.
        wait: waits, and returns the result; None before the start.
        error: why it has failed; "" if it has not.
    """

    name: str
    form: Form
    start: Start
    tensors: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()
    single: bool = True
    fuses: bool = False
    sizes: Sequence[int] = ()
    wait: Callable[[], Any] | None = None
    error: str = ""

    @property
    def settled(self) -> bool:
        """Whether it was started, or has failed."""
        return self.wait is not None or bool(self.error)

    @property
    def fusion(self) -> object:
        """The key that operations share if they may be started together."""
        fuses = self.fuses and sum(tensor.nbytes for tensor in self.tensors) < _FUSED_BYTES
        return (self.form[0], *self.form[2:]) if fuses else self.name


class Queue:
    """The operations of a process set that this rank has submitted, and not all ranks have started.

    Args:
        communicator: of the ranks of the process set.
        stand_ins: for verbs, what returns the operation by which a rank that has joined takes part in one of a name and
            form. It can't take part in others.

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
        """Queue an operation. ValueError if another one of its name is in the queue."""
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

    def poll(self, operation: Operation) -> bool:
        """Return whether an operation has been started or has failed, after a round with the other ranks if not."""
        if not operation.settled:
            self._round(_POLLS)
        return operation.settled

    def join(self) -> int:
        """Take part in the reductions of other ranks until all have joined. Return the rank that was the last."""
        while not self._round(_JOINED):
            pass
        self._joined.clear()
        return self._last_joined

    def end(self) -> None:
        """Return when all ranks end. Operations that a rank still waits for fail there."""
        while not self._round(_ENDS):
            pass

    def _round(self, state: int) -> bool:
        """Start the operations that all ranks have submitted. Return whether all have joined, or all end. Collective.

        Raises:
            HorovodInternalError: this rank has joined, and another one will not.
        """
        ranks = self.communicator
        forms = {name: self._pending[name].form for name in sorted(self._pending)}
        facts = torch.tensor([derived_seed(forms) >> 1, state], device=ranks.device)
        digests, states = ranks.collectives.all_gather(facts).T.tolist()
        if len(set(digests)) == 1 and max(states) <= _POLLS:
            self._start(list(forms))
            return False
        joined = {rank for rank, reason in enumerate(states) if reason == _JOINED}
        self._last_joined, self._joined = max(joined - self._joined, default=self._last_joined), joined
        every: list[dict[str, Form]] = ranks.all_gather_data(forms)
        if self._start_agreed(every):
            return False
        if _POLLS not in states and (_WAITS in states or len(set(states)) > 1):  # all wait, and none can submit more
            shown = (", ".join(_described(*item) for item in [*forms.items()][:3]) for forms in every)
            reasons = [_WAITS_FOR_NOTHING.get(state) or text for state, text in zip(states, shown, strict=True)]
            error = f"the ranks wait for different operations: {by_rank(enumerate(reasons))}. All must submit the same."
            self._fail(list(self._pending), error)
            if state == _JOINED:
                raise HorovodInternalError(error)
        return len(set(states)) == 1 and state >= _JOINED

    def _start_agreed(self, every: Sequence[dict[str, Form]]) -> bool:
        """Start the operations that every rank has, or has joined for; those that differ fail. Return if there are any.

        Args:
            every: the operations of each rank, by name.
        """
        agreed, ready = False, []
        for name in sorted(set().union(*every)):
            absent = {rank for rank, forms in enumerate(every) if name not in forms}
            if absent - self._joined:
                continue
            agreed = True
            those = [(rank, forms[name]) for rank, forms in enumerate(every) if name in forms]
            form = those[0][1]
            if any(other != form for _, other in those):
                text = by_rank((rank, _described(form[0], form)) for rank, form in those)
                self._fail([name], f"the operations named {name!r} differ: {text}. Give them different names.")
            elif absent and form[0] not in self._stand_ins:
                self._fail(
                    [name], f"{form[0]} does not work after hvd.join, but {name!r} was called, and ranks have joined."
                )
            else:
                if self.communicator.rank in absent:
                    stand_in = self._stand_ins[form[0]](name, form)
                    if stand_in is None:
                        raise HorovodInternalError(
                            f"this rank has joined, but does not have {name!r}, which others have."
                        )
                    self._pending[name] = stand_in
                ready.append(name)
        self._start(ready)
        return agreed

    def _fail(self, names: Iterable[str], error: str) -> None:
        for name in names:
            if name in self._pending:  # not on a rank that has joined
                self._pending.pop(name).error = error

    def _start(self, names: Sequence[str]) -> None:
        """Start operations that all ranks have, in the same order on each. Collective."""
        operations = [self._pending.pop(name) for name in names]
        sizes = [size for operation in operations for size in operation.sizes]
        device, every, first = self.communicator.device, [], 0
        if sizes:
            every = self.communicator.collectives.all_gather(torch.tensor(sizes, device=device)).tolist()
        for _, group in groupby(operations, key=attrgetter("fusion")):
            those = list(group)
            last = first + len(those[0].sizes)  # others are not fused
            tensors = [tensor.detach() for operation in those for tensor in operation.tensors]
            outputs = [output for operation in those for output in operation.outputs]
            self._started += 1
            label, rows = f"hvd.{self._started}", [row[first:last] for row in every]
            results = cache(those[0].start(self.communicator, label, tensors, outputs, rows))
            first, number = last, 0
            for operation in those:
                part = slice(number, number + (len(operation.tensors) or 1))
                operation.wait = partial(_result, results, part, operation.single)
                number = part.stop


def _result(results: Callable[[], Sequence[Any]], part: slice, single: bool) -> Any:
    return results()[part][0] if single else tuple(results()[part])


def _described(name: str, form: Form) -> str:
    """Return an operation as text for a message."""
    if len(form) < 2 or not isinstance(form[1], list):
        return repr(name)
    _, tensors, *more = form
    shown = [f"{dtype}{shape} on {device}" for dtype, shape, device in tensors[:3]]
    return f"{name!r} of {', '.join(shown)}{f' {tuple(more)}' if more else ''}"
