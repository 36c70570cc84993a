"""``unitrain bench``: measures how fast a recipe trains with each launcher and backend of this host.

The recipe runs unchanged, in real processes: ``python -m unitrain.commands.bench FILE STEPS RECIPE [FLAG ...]``, which
reads the strategy's own throughput in each of them.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import unitrain
from unitrain.commands.arguments import AfterDashes, path
from unitrain.commands.launchers import launch_command, local_launchers
from unitrain.commands.toolchain import run_to_end, small_mpi_environment
from unitrain.commands.verify.comparison import cause
from unitrain.commands.verify.worlds import World, find_worlds
from unitrain.communication.backend import backend_names, load_backend
from unitrain.errors import UsageError
from unitrain.launch.detect import detect
from unitrain.process import usable_cores
from unitrain.settings.schema import variable
from unitrain.training.hooks import StepHook

FEWEST_STEPS = 6


@dataclass(frozen=True)
class Measurement:
    """The result of measuring a world. Times are the host's in seconds a step, as means over the processes."""

    world: World
    samples_per_second: float = 0.0
    """Over all processes."""
    spread: float = 0.0
    """Half of the difference between the two measured thirds of the steps, relative to their mean."""
    data: float = 0.0
    """Waiting for the loader."""
    forward: float = 0.0
    """Everything else outside of ``strategy.step``."""
    step: float = 0.0
    """Backward, averaging gradients, waiting for slower processes, and the optimizer."""
    memory_mb: float = 0.0
    """Peak of the process that needs most."""
    problem: str = ""
    """Why the world could not be measured, in one line."""


def bench(
    target: Path,
    *,
    flags: Sequence[str] = (),
    backend: str | None = None,
    processes: int | None = None,
    steps: int = 30,
    output: Path | None = None,
) -> int:
    """Measure a recipe in one process and in every world of several, print a table, write JSON, and return 0.

    Raises:
        UsageError: an argument is wrong, this process was started by a launcher, or the recipe fails in one process.
    """
    _check(target, backend, processes, steps)
    console = Console()
    measurements: list[Measurement] = []
    for world in worlds_to_measure(backend, processes):
        console.print(f"measuring {world}: {world.backend}", markup=False)
        measurements.append(measure(world, target, flags, steps))
        if measurements[0].problem:
            raise UsageError(f"{target} can't be measured. In one process: {measurements[0].problem}")
    print_table(measurements, console)
    fastest = max(measurements, key=lambda found: found.samples_per_second).world
    console.print(f"fastest: {fastest}: {fastest.backend}", style="green", markup=False)
    if output is not None:
        output.write_text(json.dumps([asdict(found) for found in measurements], indent=1) + "\n", encoding="utf-8")
        console.print(f"written: {output}", markup=False)
    return 0


def _check(recipe: Path, backend: str | None, processes: int | None, steps: int) -> None:
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


def worlds_to_measure(backend: str | None, most: int | None) -> list[World]:
    """Return one process, the baseline, and the worlds of 2, 4, 8, ..., ``most`` processes that can be started here.

    ``most`` is by default the number of GPUs of this host, or of cores if there are none.
    """
    worlds = [World("python", 1, "single")]
    if torch.cuda.device_count() > 1 and backend is None:
        worlds.append(World("python", 1, "data_parallel"))
    most = most or torch.accelerator.device_count() or usable_cores()
    sizes = sorted({*(2**i for i in range(1, most.bit_length()) if 2**i <= most), most} - {1})
    by_launcher = {launcher: sizes for launcher in local_launchers() if launcher != "python"}
    found = find_worlds([backend] if backend else backend_names(), by_launcher)
    return [*worlds, *sorted(found, key=lambda world: world.size)]


def measure(world: World, recipe: Path, flags: Sequence[str], steps: int) -> Measurement:
    """Run a recipe for ``steps`` optimizer steps in a world, and measure it without the first third of them."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "record.json")
        program = ["-m", "unitrain.commands.bench", str(file), str(steps), str(recipe), *flags]
        program += ["--output-dir", str(Path(folder, "output"))]
        environment = {**small_mpi_environment(), variable(["backend"]): world.backend}
        code, printed = run_to_end(*launch_command(world.launcher, world.size, program), environment=environment)
        if code:
            return Measurement(world, problem=f"exit code {code}: {cause(printed)}")
        if not file.is_file():
            return Measurement(
                world, problem=f"the recipe ended before step {steps} of a strategy: let it train longer"
            )
        record = json.loads(file.read_text(encoding="utf-8"))
    if record["backend"] != world.backend:
        set_to = f"the recipe's flags or code set backend to {record['backend']}"
        return Measurement(world, problem=f"{set_to}, which takes precedence over the one to measure")
    return evaluate(world, record["thirds"], steps)


def evaluate(world: World, thirds: Sequence[Mapping[str, float]], steps: int) -> Measurement:
    """Return the measurement from the throughput of the second and of the last third of the steps."""
    counted = steps - steps // 3
    speeds = [third["samples_per_second"] for third in thirds]
    if not all(speeds):
        return Measurement(world, problem="the training loop does not iterate over strategy.dataloader")
    seconds = {part: sum(third[f"{part}_seconds"] for third in thirds) / counted for part in ("data", "rest", "step")}
    return Measurement(
        world,
        samples_per_second=mean(speeds),
        spread=(max(speeds) - min(speeds)) / 2 / mean(speeds),
        data=seconds["data"],
        forward=seconds["rest"],
        step=seconds["step"],
        memory_mb=thirds[-1]["peak_memory_mb"],
    )


def print_table(measurements: Sequence[Measurement], console: Console) -> None:
    """Print a line per measurement. The first is the baseline, one process."""
    caption = "eff.: efficiency relative to one process; data, forward, step: ms in a step; memory: peak in MiB"
    table = Table(title="Throughput", caption=caption, box=None, pad_edge=False)
    table.add_column("", overflow="fold", min_width=21)
    for column in ("samples/s", "±", "eff.", "data", "forward", "step", "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    for found in measurements:
        name = f"{found.world} {found.world.backend}"
        if found.problem:
            table.add_row(name, "[red]failed")
            continue
        efficiency = found.samples_per_second / (found.world.size * measurements[0].samples_per_second)
        speed = (f"{found.samples_per_second:,.0f}", f"{found.spread:.0%}", f"{efficiency:.0%}")
        times = [_milliseconds(seconds) for seconds in (found.data, found.forward, found.step)]
        table.add_row(name, *speed, *times, f"{found.memory_mb:,.0f}")
    console.print(table)
    for found in measurements:
        if found.problem:
            console.print(f"{found.world}, {found.world.backend}: {found.problem}", style="red", markup=False)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f}" if seconds >= 0.1 else f"{1000 * seconds:.3g}"


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
    parser.add_argument("--output", type=path, metavar="FILE", help="write the measurements to this file as JSON")
    parser.add_argument("target", type=path, metavar="TARGET", help="path of a recipe; options of bench go before it")
    parser.add_argument(
        "flags", nargs=argparse.REMAINDER, action=AfterDashes, metavar="FLAG", help="flags for the recipe"
    )
    parser.set_defaults(run=bench)


# -------------------------------------------------------------------------------------------------- in each process


class _Recorder(StepHook):
    """Writes the throughput of the second and of the last third of a number of steps on rank 0, and ends the run."""

    def __init__(self, strategy: unitrain.Strategy, file: Path, steps: int) -> None:
        self._strategy = strategy
        self._file = file
        self._throughput = strategy.throughput()
        self._ends = [strategy.global_step + third * steps // 3 for third in (1, 2, 3)]
        self._thirds: list[dict[str, float]] = []
        strategy._step.hooks.add_hook(self)

    def after_call(self) -> None:
        """Read the throughput if a third has ended."""
        if self._strategy.global_step < self._ends[0]:
            return
        del self._ends[0]
        self._thirds.append(self._throughput.read())
        if not self._ends:
            if self._strategy.is_main:
                record = {"backend": self._strategy.config.backend, "thirds": self._thirds[1:]}
                self._file.write_text(json.dumps(record), encoding="utf-8")
            self._strategy.close()
            raise SystemExit(0)


def _run(file: Path, steps: int, recipe: str, *flags: str) -> None:
    """Run the recipe like ``python RECIPE FLAG ...``, with a recorder on its strategy."""
    init = unitrain.init

    def recorded(*arguments: Any, **settings: Any) -> unitrain.Strategy:
        strategy = init(*arguments, **settings)
        _Recorder(strategy, file, steps)
        return strategy

    unitrain.init = recorded
    sys.argv = [recipe, *flags]
    sys.path[0] = str(Path(recipe).parent)
    runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    _run(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
