"""The command: measures every world and setting, and reports the results."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from unitrain.commands.bench.candidates import LEVERS, Candidate, most_processes, worlds_to_measure
from unitrain.commands.bench.measuring import Measurement, measure
from unitrain.commands.bench.report import check_can_draw, draw, print_table, recommendation
from unitrain.commands.bench.search import Levers, fastest, try_worlds
from unitrain.commands.verify.worlds import World
from unitrain.communication.backend import backend_names, load_backend
from unitrain.errors import UsageError
from unitrain.launch.detect import detect

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
    picture: bool = True,
) -> int:
    """Measure a recipe, print a table, write ``results.json``, ``results.png`` and ``recommended.yaml``; return 0.

    Args:
        recipe: a script that calls ``unitrain.init`` and takes ``--output-dir``.
        flags: further flags for it.
        backend: the only backend to use with several processes; default: all that are installed.
        processes: maximum number of processes; default: number of GPUs, else of cores.
        levers: settings to tune in the fastest world.
        steps: optimizer steps per run, of which the first third is not counted.
        output: output folder.
        picture: whether to draw a picture, which needs matplotlib.

    Raises:
        UsageError: an argument is wrong, this process was started by a launcher, or the recipe fails in one process.
    """
    _check(recipe, backend, processes, levers, steps)
    if picture:
        check_can_draw()
    # One process on one device is the baseline; DataParallel also runs in one process.
    single_process = [World("python", 1, "single")]
    if torch.cuda.device_count() > 1 and backend is None:
        single_process.append(World("python", 1, "data_parallel"))
    backends = [backend] if backend else backend_names()
    worlds = [*single_process, *worlds_to_measure(backends, processes or most_processes())]
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(worlds))
        measurements, best = _measure_all(recipe, flags, steps, worlds, levers, progress, task)
    print_table(measurements, console)
    output.mkdir(parents=True, exist_ok=True)
    files = [output / "results.json", output / "recommended.yaml"]
    files[0].write_text(json.dumps([found.as_dict() for found in measurements], indent=1) + "\n", encoding="utf-8")
    files[1].write_text(recommendation(best, recipe, flags, files[1]), encoding="utf-8")
    if picture:
        files.append(output / "results.png")
        draw(measurements, f"{recipe.name} {' '.join(flags)}, {steps} steps", files[-1])
    console.print(f"fastest: {best.candidate}", style="green", markup=False)
    console.print(f"written: {', '.join(map(str, files))}", markup=False)
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


def _measure_all(
    recipe: Path,
    flags: Sequence[str],
    steps: int,
    worlds: Sequence[World],
    levers: Sequence[str],
    progress: Progress,
    task: TaskID,
) -> tuple[list[Measurement], Measurement]:
    """Return all measurements, that of one process first, and the fastest."""

    def one(candidate: Candidate) -> Measurement:
        progress.update(task, description=str(candidate))
        return measure(candidate, recipe, flags, steps)

    measurements = []
    for found in try_worlds(worlds, one):
        measurements.append(found)
        progress.advance(task)
        if measurements[0].problem:
            raise UsageError(f"{recipe} can't be measured. In one process: {measurements[0].problem}")
    tried = Levers(fastest(measurements), levers, one)
    progress.update(task, total=len(worlds) + len(tried))
    for found in tried:
        measurements.append(found)
        progress.advance(task)
    return measurements, tried.best
