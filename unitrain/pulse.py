"""What a process is doing, as it notes it down for the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

OWN_CODE = "its own code"
CLOSING = "close"


class Pulse:
    """What this process's main thread is doing. Written there, at the cost of an assignment, and read by the watch.

    Attributes:
        phase: what it is waiting for the other ranks in, else ``OWN_CODE``.
        calls: how many waits it has begun, so that two that follow one another can be told from one that lasts.
        step: optimizer steps that the run has made.
        boundary: how many boundaries it has passed, at which a run can be stopped.
    """

    __slots__ = ("_failed", "boundary", "calls", "phase", "step")

    def __init__(self) -> None:
        self.step: int = 0
        self.boundary: int = 0
        self.phase: str = OWN_CODE
        self.calls: int = 0
        self._failed = False

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Note that the block waits for the other ranks; of nested blocks, the outermost says in what.

        A wait that fails stays noted: the other ranks are told where this one failed, for as long as it can be asked.
        """
        self.calls += 1
        outermost = self._failed or self.phase is OWN_CODE
        if outermost:
            self.phase, self._failed = phase, False
        try:
            yield
        except BaseException:
            self._failed = True
            raise
        if outermost:
            self.phase = OWN_CODE
