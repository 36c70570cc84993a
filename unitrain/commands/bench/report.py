"""Reports measurements: a table, a picture, and the recommended configuration."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from unitrain.commands.bench.candidates import Candidate
from unitrain.commands.bench.measuring import Measurement, Split
from unitrain.commands.launchers import launch_command
from unitrain.errors import UsageError
from unitrain.settings.schema import as_string
from unitrain.settings.yaml_file import dump

PARTS = tuple(field.name for field in fields(Split))
_SHORT = ("data", "compute", "comm.", "idle")
_COLOURS = ("tab:orange", "tab:blue", "tab:red", "lightgrey")


def efficiency(measurement: Measurement, alone: Measurement) -> float:
    """Return samples per second divided by the number of processes times those of one process."""
    return measurement.samples_per_second / (measurement.candidate.world.size * alone.samples_per_second)


def print_table(measurements: Sequence[Measurement], console: Console) -> None:
    """Print a line per measurement. The first is the baseline, one process."""
    caption = "eff.: efficiency relative to one process; comm.: communication; times in ms"
    table = Table(title="Median optimizer step", caption=caption, box=None, pad_edge=False)
    table.add_column("", overflow="fold", min_width=21)
    for column in ("samples/s", "eff.", "step", "±", *_SHORT):
        table.add_column(column, justify="right", no_wrap=True)
    for found in measurements:
        candidate = found.candidate
        settings = [f"  {name} {as_string(value)}" for name, value in candidate.settings]
        name = "\n".join([f"{candidate.world} {candidate.world.backend}", *settings])
        if found.problem:
            table.add_row(name, "[red]failed")
            continue
        parts = [_milliseconds(part) for part in astuple(found.split)] if found.split else ["?"] * len(PARTS)
        share = f"{efficiency(found, measurements[0]):.0%}"
        step = (_milliseconds(found.step_seconds), f"{found.spread:.0%}")
        table.add_row(name, f"{found.samples_per_second:,.0f}", share, *step, *parts)
    console.print(table)
    for found in measurements:
        if found.problem:
            console.print(f"{found.candidate}: {found.problem}", style="red", markup=False)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f}" if seconds >= 0.1 else f"{1000 * seconds:.3g}"


def check_can_draw() -> None:
    """Raise UsageError if matplotlib is missing, before anything is measured."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"the picture needs matplotlib, which can't be imported ({error}): pip install matplotlib, or pass "
            "--no-picture."
        ) from error


def draw(measurements: Sequence[Measurement], title: str, path: Path) -> None:
    """Save a picture of the measurements: samples per second, efficiency, and where the time of a step goes.

    Args:
        measurements: the first is the baseline, one process.
        title: title of the picture.
        path: path of the file; its suffix sets the format.
    """
    from matplotlib.figure import Figure  # slow to import, and not a dependency

    shown = [found for found in measurements if not found.problem][::-1]
    places = range(len(shown))
    figure = Figure(figsize=(15, 1.8 + 0.5 * len(shown)), layout="constrained")
    speed, share, time = figure.subplots(1, 3, sharey=True)
    figure.suptitle(title, x=0.01, horizontalalignment="left")
    speed.barh(places, [found.samples_per_second for found in shown])
    speed.set_xlabel("samples/s")
    speed.set_yticks(places, [str(found.candidate).replace(", ", "\n") for found in shown])
    share.barh(places, [100 * efficiency(found, measurements[0]) for found in shown], color="tab:green")
    share.axvline(100, color="grey", linewidth=0.8)
    share.set_xlabel("efficiency relative to one process, %")
    reached = [0.0] * len(shown)
    for part, colour in zip(PARTS, _COLOURS, strict=True):
        width = [1000 * getattr(found.split, part) if found.split else 0.0 for found in shown]
        time.barh(places, width, left=reached, label=part, color=colour)
        reached = [begin + more for begin, more in zip(reached, width, strict=True)]
    time.set_xlabel("ms per step")
    for axes in (speed, share, time):
        axes.locator_params(axis="x", nbins=6)
    figure.legend(loc="outside upper right", ncols=len(PARTS))
    figure.savefig(path, dpi=110)


def recommendation(best: Measurement, recipe: Path, flags: Sequence[str], file: Path) -> str:
    """Return the settings of the fastest candidate as YAML for ``--config``, with its command as a comment.

    Args:
        best: the measurement of the fastest candidate.
        recipe: the recipe.
        flags: flags of the recipe.
        file: path that the YAML will be written to.
    """
    strategy: dict[str, Any] = {"backend": best.candidate.world.backend}
    for name, value in best.candidate.settings:
        *sections, own = name.split(".")
        section = strategy
        for part in sections:
            section = section.setdefault(part, {})
        section[own] = value
    lines = [
        f"{best.samples_per_second:,.0f} samples/s, measured by unitrain bench. Start with",
        f"  {start_command(best.candidate, [str(recipe), *flags, '--config', str(file)])}",
        "or set the same settings for any script as environment variables:",
        f"  {' '.join(f'{name}={value}' for name, value in best.candidate.variables().items())}",
    ]
    return "".join(f"# {line}\n" for line in lines) + dump({"strategy": strategy})


def start_command(candidate: Candidate, arguments: Sequence[str]) -> str:
    """Return the command that starts ``python ARGUMENTS`` as a candidate, as one would type it."""
    command = launch_command(candidate.world.launcher, candidate.world.size, arguments)
    return shlex.join("python" if word == sys.executable else word for word in command)
