"""What a probe has found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "absent", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """The result of a probe."""

    status: Status
    """ok; absent (not installed, and optional); warning (works in part); error (broken)."""
    summary: str
    fix: str | None = None
    """The commands that install or fix it, one on each line."""


Probe = Callable[[], Finding]


def guarded(probe: Probe) -> Finding:
    """Return what a probe finds; an error if it raises one, so that the other probes still run."""
    try:
        return probe()
    except Exception as error:
        return Finding("error", f"{type(error).__name__}: {error}")
