"""``Waits``: lets the waits for collectives be measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
Around = Callable[[Callable[[], Any]], Any]
"""Is given a wait, and returns what it does."""


class Waits:
    """What is called around each wait. Without ``measures``, nothing stands between a caller and the backend."""

    def __init__(self, *, measures: bool) -> None:
        self._measures = measures
        self._around: Around | None = None

    def of(self, collective: Callable[..., Callable[[], T]]) -> Callable[..., Callable[[], T]]:
        """Return a collective that has its waits called by what measures them."""
        if not self._measures:
            return collective

        def called(*arguments: Any) -> Callable[[], T]:
            wait = collective(*arguments)
            return wait if self._around is None else partial(self._around, wait)

        return called

    def measure(self, around: Around) -> None:
        """Let ``around`` call the waits for collectives that are started from now on."""
        self._around = around

    def end(self) -> None:
        """Measure no more."""
        self._around = None
