"""A progress bar for a loader on rank 0's terminal: samples of all ranks, samples per second, remaining time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from unitrain.data.loader import Loader


class ProgressBar:
    """Iterates over a loader with a progress bar. Made by ``strategy.progress``.

    Shows nothing without a terminal, and on ranks other than 0.

    Args:
        loader: the loader.
        is_main: whether this is rank 0, which shows the bar.
        description: shown before the bar.
        console: where the bar is shown; default: stderr.
    """

    def __init__(self, loader: Loader, description: str = "", *, is_main: bool, console: Console | None = None) -> None:
        self._loader = loader
        self._description = description
        self._console = console or Console(stderr=True)
        self._shown = is_main and self._console.is_terminal
        self._values = ""

    def show(self, **values: Any) -> None:
        """Show values after the bar, such as a loss, with four significant digits for floats."""
        shown = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
        )
        self._values = ", ".join(shown)

    def __iter__(self) -> Iterator[Any]:
        """Yield the loader's batches."""
        if not self._shown:
            yield from self._loader
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            _Pace(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}"),
        )
        total = self._loader.samples
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = None
            for batch in self._loader:
                if task is None:  # only now is the start known: the epoch may have been resumed
                    done = self._loader.yielded
                    task = progress.add_task(self._description, total=total, completed=done, values="")
                yield batch
                progress.update(task, completed=self._loader.yielded, values=self._values)


class _Pace(ProgressColumn):
    """Samples per second, over all ranks."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} samples/s" if speed else "")
