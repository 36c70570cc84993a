"""Measures a candidate: starts its processes, and evaluates their records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from operator import sub
from pathlib import Path
from statistics import mean, median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from unitrain.commands.bench.candidates import Candidate
from unitrain.commands.launchers import launch_command
from unitrain.commands.toolchain import running, small_mpi_environment
from unitrain.commands.verify.comparison import cause
from unitrain.metrics.throughput import Totals


class Split(NamedTuple):
    """Where the time of a step goes, in seconds of the host, as means over the ranks."""

    data: float = 0.0
    """Waiting for the loader."""
    forward: float = 0.0
    """Everything else before ``strategy.step``."""
    step: float = 0.0
    """Backward, averaging gradients, and the optimizer."""
    idle: float = 0.0
    """The part of the step in which a rank waits for the slowest one to begin it."""


@dataclass(frozen=True)
class Measurement:
    """The result of measuring a candidate."""

    candidate: Candidate
    samples_per_second: float = 0.0
    """Over all processes."""
    step_seconds: float = 0.0
    """Median duration of an optimizer step."""
    spread: float = 0.0
    """Half of the interquartile range of the steps, relative to the median."""
    split: Split | None = None
    problem: str = ""
    """Why it could not be measured, in one line."""

    def as_dict(self) -> dict[str, Any]:
        """Return the measurement for JSON."""
        world = self.candidate.world
        where = {"launcher": world.launcher, "processes": world.size, "backend": world.backend}
        more = {"split": self.split and self.split._asdict(), "settings": dict(self.candidate.settings)}
        return {**where, **asdict(self), **more, "candidate": str(self.candidate)}


def measure(candidate: Candidate, recipe: Path, flags: Sequence[str], steps: int) -> Measurement:
    """Run a recipe for ``steps`` optimizer steps, of which the first third is not counted, and measure it.

    Args:
        candidate: world and settings to run it with.
        recipe: a script that calls ``unitrain.init`` and takes ``--output-dir``.
        flags: further flags for it.
        steps: number of optimizer steps, at least 6.
    """
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        program = ["-m", "unitrain.commands.bench.trial", temporary, str(steps), str(recipe), *flags]
        program += ["--output-dir", str(folder / "output")]
        world = candidate.world
        environment = {**small_mpi_environment(), **candidate.variables()}
        with running(launch_command(world.launcher, world.size, program), environment) as process:
            printed, _ = process.communicate()
        if process.returncode:
            return Measurement(candidate, problem=f"exit code {process.returncode}: {cause(printed)}")
        records = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("rank*.json"))]
    problem = _problem(candidate, records, steps)
    if problem:
        return Measurement(candidate, problem=problem)
    return evaluate(candidate, [record["steps"][steps // 3 :] for record in records])


def _problem(candidate: Candidate, records: Sequence[dict[str, Any]], steps: int) -> str:
    """Return why the records are incomplete or not of this candidate, or an empty string."""
    if not records:
        return "the recipe did not call unitrain.init()"
    if len(records) != candidate.world.size:
        return f"only {len(records)} of {candidate.world.size} processes wrote a record"
    taken = len(records[0]["steps"])
    if taken < steps:
        return f"the recipe made only {taken} of {steps} steps in loops over strategy.dataloader: let it train longer"
    for name, value in (("backend", candidate.world.backend), *candidate.settings):
        found = records[0]["settings"]
        for part in name.split("."):
            found = found[part]
        if found != value:
            return f"the recipe's flags or code set {name} to {found}, which takes precedence over the value to measure"
    return ""


def evaluate(candidate: Candidate, ranks: Sequence[Sequence[Sequence[float]]]) -> Measurement:
    """Return the measurement of a candidate from the ``Totals`` of each rank at the end of each step."""
    ranks_steps = [[Totals(*map(sub, after, before)) for before, after in pairwise(rank)] for rank in ranks]
    steps = [mean(one.seconds for one in step) for step in zip(*ranks_steps, strict=True)]
    samples = sum(one.samples for rank in ranks_steps for one in rank) / len(steps)
    typical = median(steps)
    if not (typical and samples):
        return Measurement(candidate, problem="the training loop does not iterate over strategy.dataloader")
    low, _, high = quantiles(steps, n=4)
    before = [median(one.seconds - one.step for one in rank) for rank in ranks_steps]  # of each rank, in a step
    data = mean(median(one.data for one in rank) for rank in ranks_steps)
    idle = min(max(before) - mean(before), typical - mean(before))
    split = Split(data, mean(before) - data, typical - mean(before) - idle, idle)
    return Measurement(candidate, samples / typical, typical, (high - low) / 2 / typical, split)
