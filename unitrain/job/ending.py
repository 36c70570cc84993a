"""Ends this process because of other ranks, unless something else is to happen then."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from unitrain.process import exit_now

_successor: Callable[[str], NoReturn] | None = None


def succeed_by(successor: Callable[[str], NoReturn]) -> None:
    """Call a function in place of ending this process because of other ranks.

    Args:
        successor: prints the line that it is given, which says why, and has the process go on without these ranks. It
            is called in any thread.
    """
    global _successor
    _successor = successor


def is_succeeded() -> bool:
    """Return whether this process goes on, in another world, when other ranks have failed."""
    return _successor is not None


def end_for_others(line: str, code: int = 1) -> NoReturn:
    """End this process because of other ranks, or have it go on in a world without them. From any thread.

    Args:
        line: says why, on stderr.
        code: the exit code, if the process ends.
    """
    if _successor is not None:
        _successor(line)
    exit_now(code, line)
