"""Measures a recipe in one world: starts its processes, and evaluates the throughput that they record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from unitrain.commands.launchers import launch_command
from unitrain.commands.toolchain import run_to_end, small_mpi_environment
from unitrain.commands.verify.comparison import cause
from unitrain.commands.verify.worlds import World
from unitrain.settings.schema import variable


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


def measure(world: World, recipe: Path, flags: Sequence[str], steps: int) -> Measurement:
    """Run a recipe for ``steps`` optimizer steps in a world, and measure it without the first third of them."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "record.json")
        program = ["-m", "unitrain.commands.bench.trial", str(file), str(steps), str(recipe), *flags]
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
