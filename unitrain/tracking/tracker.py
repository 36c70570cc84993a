"""The protocol of a tracker, and how a run is started in one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class Tracker(Protocol):
    """Records the metrics of one run somewhere. All methods are called in one thread, one after another.

    A method may take long, and may raise any exception: training does not wait for it, and goes on.
    """

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Record the run's settings. Also called when the run continues, perhaps with other values."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics by the optimizer step. After a resume, steps may come again that were recorded before."""

    def close(self, *, completed: bool) -> None:
        """Record the end of the run: whether the script closed the trackers, or the process ends before."""


class Run(NamedTuple):
    """The run that a tracker is to record."""

    folder: Path
    """The folder of the run's results, which exists."""
    name: str
    """Name of the run."""
    step: int
    """The last step before the run was resumed; 0 for a new run."""
    id: str | None
    """The id that the tracker's service gave to this run, if it continues; None for a new one."""
