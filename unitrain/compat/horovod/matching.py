"""Matches the operations of the ranks by name, in whichever order each rank has submitted them.

Nothing runs in the background. An operation is queued until its rank waits for it, or polls it. Then the ranks compare
their queues in a round, and start what all of them have, in the order of the names. If no rank can go on, because each
waits for what another has not submitted, all of them raise an error that names these operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from unitrain.communication.communicator import Communicator
from unitrain.errors import CommunicationError, by_rank
from unitrain.rng import derived_seed

WAITS, POLLS, JOINED, ENDS = range(4)
"""Why a rank takes part in a round: it waits for an operation, polls one, has joined, or shuts down."""


class HorovodInternalError(CommunicationError, RuntimeError):
    """An operation that the ranks could not complete: they have submitted different ones, or a rank has gone."""


@dataclass(eq=False)
class Operation:
    """An operation that a rank has submitted.

    Attributes:
        name: by which the ranks match it.
        form: what must be the same on all ranks, as plain data: the verb first, the dtype, the shape, the factors.
        start: starts it, given the communicator and what each rank has as ``sizes``. Returns a function that waits and
            returns the result.
        sizes: what may differ between the ranks, and all of them must know: numbers of rows.
        error: why it has failed; None if it has not.
        wait: what ``start`` has returned; None before.
    """

    name: str
    form: tuple[Any, ...]
    start: Callable[[Communicator, Sequence[Sequence[int]]], Callable[[], Any]]
    sizes: Sequence[int] = ()
    error: str | None = None
    wait: Callable[[], Any] | None = field(default=None, repr=False)


class Queue:
    """The operations of a process set that this rank has submitted, and not all ranks have started.

    Args:
        communicator: of the ranks of the process set.
        stand_in: returns the operation by which a rank that has joined takes part in one of this form, with zeros.
            Raises ValueError if that is impossible.

    Attributes:
        communicator: as above.
    """

    def __init__(self, communicator: Communicator, stand_in: Callable[[str, tuple[Any, ...]], Operation]) -> None:
        self.communicator = communicator
        self._stand_in = stand_in
        self._pending: dict[str, Operation] = {}
        self._unnamed: dict[str, int] = {}

    def name(self, verb: str) -> str:
        """Return the name of the next operation of a verb that the script has given none."""
        self._unnamed[verb] = number = self._unnamed.get(verb, 0) + 1
        return f"{verb}.noname.{number}"
