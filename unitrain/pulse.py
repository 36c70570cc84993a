"""``Pulse``: records the present call of this process for the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

USER_CODE = "user code"
CLOSING = "close"
ITERATION = 2**48
"""Length of an iteration over a loader in a position: more than all samples of a run."""
_UNMARKED = nullcontext()
Mark = Callable[[str], AbstractContextManager[Any]]
"""Returns a context manager that marks a phase in a trace, given its name."""


class Pulse:
    """Records the present call of the main thread, which writes it at the cost of an assignment. The watch reads it.

    Attributes:
        phase: the call in which it waits for the other ranks, or ``USER_CODE``.
        calls: number of waits so far, which distinguishes two consecutive waits from a long one.
        step: number of optimizer steps so far.
        boundary: number of boundaries passed so far, at which a run can be stopped.
        trained: number of steps that this process has made, and the position in the data at the end of the last one.
            Unlike ``step``, neither goes back in a resume or a trial.
        trial: name of the trial in progress, with the names of those that it is in: ``outer/inner``; "" outside of one.
        mark: marks the phases in a trace, while one is recorded.
    """

    __slots__ = ("_failed", "boundary", "calls", "mark", "phase", "step", "trained", "trial")

    def __init__(self) -> None:
        self.step: int = 0
        self.boundary: int = 0
        self.trained: tuple[int, int] = (0, 0)
        self.trial: str = ""
        self.phase: str = USER_CODE
        self.calls: int = 0
        self._failed = False
        self.mark: Mark | None = None

    @property
    def of_trial(self) -> str:
        """The trial in progress, as it follows the number of a step in a message."""
        return f" of trial {self.trial!r}" if self.trial else ""

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Record that the block waits for the other ranks. Of nested blocks, the outermost sets the phase.

        A wait that fails stays recorded, so that the other ranks can report where this one failed.

        Args:
            phase: name of the call, as it is shown to users: "backward", "the next batch".
        """
        self.calls += 1
        # After a failure, the phase is still that of the failed wait, and the next block takes its place.
        outermost = self._failed or self.phase is USER_CODE
        if outermost:
            self.phase, self._failed = phase, False
        try:
            with _UNMARKED if self.mark is None else self.mark(phase):
                yield
        except BaseException:
            self._failed = True
            raise
        if outermost:
            self.phase = USER_CODE
