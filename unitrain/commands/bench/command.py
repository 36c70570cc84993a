"""The command: measures every world, tunes settings in the fastest, and reports the results."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from unitrain.commands.arguments import after_dashes, path
from unitrain.commands.bench.candidates import LEVERS, Candidate, levers_of, worlds_to_measure
from unitrain.commands.bench.measuring import Measurement, Split, measure
from unitrain.commands.launchers import launch_command
from unitrain.commands.verify.worlds import World
from unitrain.communication.backend import backend_names, load_backend
from unitrain.errors import UsageError
from unitrain.launch.detect import detect
from unitrain.settings.schema import as_string
from unitrain.settings.yaml_file import dump

FEWEST_STEPS = 6


def bench(
    recipe: Path,
    *,
    flags: Sequence[str] = (),
    backend: str | None = None,
    processes: int | None = None,
    levers: Sequence[str] = tuple(LEVERS),
    steps: int = 30,
    output: Path = Path("bench"),
) -> int:
    """Measure a recipe, print a table, write ``results.json`` and ``recommended.yaml``, and return 0.

    Args:
        recipe: a script that calls ``unitrain.init`` and takes ``--output-dir``.
        flags: further flags for it.
        backend: the only backend to use with several processes; default: all that are installed.
        processes: maximum number of processes; default: number of GPUs, else of cores.
        levers: settings to tune in the fastest world.
        steps: optimizer steps per run, of which the first third is not counted.
        output: output folder.

    Raises:
        UsageError: an argument is wrong, this process was started by a launcher, or the recipe fails in one process.
    """
    _check(recipe, backend, processes, levers, steps)
    # One process on one device is the baseline; DataParallel also runs in one process.
    worlds = [World("python", 1, "single")]
    if torch.cuda.device_count() > 1 and backend is None:
        worlds.append(World("python", 1, "data_parallel"))
    worlds += worlds_to_measure([backend] if backend else backend_names(), processes)
    console = Console()

    def measured(candidate: Candidate) -> Measurement:
        console.print(f"measuring {candidate}", markup=False)
        return measure(candidate, recipe, flags, steps)

    measurements: list[Measurement] = []
    for world in worlds:
        measurements.append(measured(Candidate(world)))
        if measurements[0].problem:
            raise UsageError(f"{recipe} can't be measured. In one process: {measurements[0].problem}")
    tuning = Tuning(fastest(measurements), levers, measured)
    measurements += tuning
    print_table(measurements, console)
    output.mkdir(parents=True, exist_ok=True)
    results, recommended = output / "results.json", output / "recommended.yaml"
    results.write_text(json.dumps([found.as_dict() for found in measurements], indent=1) + "\n", encoding="utf-8")
    recommended.write_text(recommendation(tuning.best, recipe, flags, recommended), encoding="utf-8")
    console.print(f"fastest: {tuning.best.candidate}", style="green", markup=False)
    console.print(f"written: {results}, {recommended}", markup=False)
    return 0


def _check(recipe: Path, backend: str | None, processes: int | None, levers: Sequence[str], steps: int) -> None:
    if detect(os.environ).world_size > 1:
        raise UsageError("bench starts processes itself: run it alone, not under a launcher.")
    if not recipe.is_file():
        raise UsageError(f"{recipe} is not a file: give the path of a script, followed by its flags.")
    if backend is not None:
        load_backend(backend)
    if steps < FEWEST_STEPS:
        raise UsageError(f"--steps is {steps}, but must be at least {FEWEST_STEPS}: the first third is not counted.")
    if processes is not None and processes < 1:
        raise UsageError(f"--processes is {processes}, but must be at least 1.")
    unknown = [lever for lever in levers if lever not in LEVERS]
    if unknown:
        raise UsageError(f"--levers: {unknown[0]!r} can't be tuned; choose from {', '.join(LEVERS)}.")


def fastest(measurements: Sequence[Measurement]) -> Measurement:
    """Return the measurement with the most samples per second."""
    return max(measurements, key=lambda measurement: measurement.samples_per_second)


class Tuning:
    """Tunes settings of a candidate, one after the other, and keeps those that make it faster.

    Two runs of the same candidate differ by more than most settings gain. So a setting that seems to help is measured
    again, and so is the best candidate without it. It is kept only if the slower of its runs is faster than the faster
    run without it.

    Args:
        base: the measurement of the fastest world.
        names: the settings to tune.
        measure: measures a candidate.

    Attributes:
        best: the fastest measurement so far.
    """

    def __init__(self, base: Measurement, names: Sequence[str], measure: Callable[[Candidate], Measurement]) -> None:
        self.best: Measurement = base
        self._names = names
        self._measure = measure

    def __iter__(self) -> Iterator[Measurement]:
        """Yield the measurement of each value."""
        for name, value in list(levers_of(self.best.candidate.world, self._names)):
            found = self._measure(self.best.candidate.with_setting(name, value))
            yield found
            if found.samples_per_second > self.best.samples_per_second:
                without = fastest([self.best, self._measure(self.best.candidate)])
                again = self._measure(found.candidate)
                slower = min(found, again, key=lambda measurement: measurement.samples_per_second)
                if slower.samples_per_second > without.samples_per_second:
                    self.best = slower


def efficiency(measurement: Measurement, alone: Measurement) -> float:
    """Return samples per second divided by the number of processes times those of one process."""
    return measurement.samples_per_second / (measurement.candidate.world.size * alone.samples_per_second)


def print_table(measurements: Sequence[Measurement], console: Console) -> None:
    """Print a line per measurement. The first is the baseline, one process."""
    caption = "eff.: efficiency relative to one process; times in ms"
    table = Table(title="Median optimizer step", caption=caption, box=None, pad_edge=False)
    table.add_column("", overflow="fold", min_width=21)
    for column in ("samples/s", "eff.", "time", "±", *Split._fields):
        table.add_column(column, justify="right", no_wrap=True)
    for found in measurements:
        candidate = found.candidate
        settings = [f"  {name} {as_string(value)}" for name, value in candidate.settings]
        name = "\n".join([f"{candidate.world} {candidate.world.backend}", *settings])
        if found.split is None:
            table.add_row(name, "[red]failed")
            continue
        share = f"{efficiency(found, measurements[0]):.0%}"
        step = (_milliseconds(found.step_seconds), f"{found.spread:.0%}")
        table.add_row(name, f"{found.samples_per_second:,.0f}", share, *step, *map(_milliseconds, found.split))
    console.print(table)
    for found in measurements:
        if found.problem:
            console.print(f"{found.candidate}: {found.problem}", style="red", markup=False)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f}" if seconds >= 0.1 else f"{1000 * seconds:.3g}"


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
    world = best.candidate.world
    command = launch_command(world.launcher, world.size, [str(recipe), *flags, "--config", str(file)])
    lines = [
        f"{best.samples_per_second:,.0f} samples/s, measured by unitrain bench. Start with",
        f"  {shlex.join('python' if word == sys.executable else word for word in command)}",
        "or set the same settings for any script as environment variables:",
        f"  {' '.join(f'{name}={value}' for name, value in best.candidate.variables().items())}",
    ]
    return "".join(f"# {line}\n" for line in lines) + dump({"strategy": strategy})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.usage = "unitrain bench [OPTION ...] TARGET [-- FLAG ...]"
    parser.add_argument(
        "--backend", metavar="NAME", help="the only backend to use with several processes (default: all)"
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="maximum number of processes (default: number of GPUs, else of cores)",
    )
    parser.add_argument(
        "--steps", type=int, default=30, metavar="N", help="optimizer steps per run (default: %(default)s)"
    )
    parser.add_argument("--levers", metavar="NAMES", help="settings to tune, comma-separated, or none (default: all)")
    parser.add_argument(
        "--output", type=path, default=Path("bench"), metavar="FOLDER", help="output folder (default: %(default)s)"
    )
    parser.add_argument("target", type=path, metavar="TARGET", help="path of a recipe; options of bench go before it")
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="FLAG", help="flags for the recipe")
    parser.set_defaults(run=_run_command)


def _run_command(arguments: argparse.Namespace) -> int:
    levers = tuple(LEVERS) if arguments.levers is None else tuple(arguments.levers.split(","))
    return bench(
        arguments.target,
        flags=after_dashes(arguments.flags),
        backend=arguments.backend,
        processes=arguments.processes,
        levers=() if levers == ("none",) else levers,
        steps=arguments.steps,
        output=arguments.output,
    )
