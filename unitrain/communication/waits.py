"""``Waits``: lets the waits for collectives be measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Waits:
    """Calls ``around`` with each wait of the collectives that it was given. ``around`` returns what the wait does."""

    def __init__(self) -> None:
        self.around: Callable[[Callable[[], Any]], Any] | None = None

    def of(self, collective: Callable[..., Callable[[], T]]) -> Callable[..., Callable[[], T]]:
        """Return a collective that has its waits measured."""

        def called(*arguments: Any) -> Callable[[], T]:
            wait = collective(*arguments)
            return wait if self.around is None else partial(self.around, wait)

        return called
