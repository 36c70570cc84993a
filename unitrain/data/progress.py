"""A progress bar over a loader, on rank 0's terminal: samples of all ranks, samples a second, time left."""

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
    """Iterates over a loader and shows how far it is. Made by ``strategy.progress``.

    Where there is no terminal, and on ranks other than 0, it shows nothing.

    Args:
        loader: of a strategy.
        is_main: whether this is rank 0, which shows it.
        description: what stands before the bar.
        console: where it is shown; default: standard error.
    """

    def __init__(self, loader: Loader, description: str = "", *, is_main: bool, console: Console | None = None) -> None:
        self._loader = loader
        self._description = description
        self._console = console or Console(stderr=True)
        self._shown = is_main and self._console.is_terminal
        self._values = ""

    def show(self, **values: Any) -> None:
        """Show values behind the bar, a loss say, from the next refresh on. Floats have four digits."""
        texts = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
        )
        self._values = ", ".join(texts)

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
                if task is None:  # only now is it known where the epoch began: it may have been continued
                    done = self._loader.yielded
                    task = progress.add_task(self._description, total=total, completed=done, values="")
                yield batch
                progress.update(task, completed=self._loader.yielded, values=self._values)


class _Pace(ProgressColumn):
    """Samples a second, of all ranks."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} samples/s" if speed else "")
