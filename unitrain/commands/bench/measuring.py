"""Measures a candidate: starts its processes, and evaluates their records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from unitrain.commands.bench.candidates import Candidate
from unitrain.commands.launchers import launch_command
from unitrain.commands.toolchain import running, small_mpi_environment
from unitrain.commands.verify.comparison import cause


@dataclass(frozen=True)
class Split:
    """Where the time of a step goes, in seconds, as means over the ranks."""

    data: float
    """Waiting for the loader."""
    compute: float
    """Forward, backward and optimizer, as measured without communication."""
    communication: float
    """Averaging gradients, as far as it does not overlap with backward."""
    idle: float
    """Waiting for the slowest rank."""


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
    """None if steps without communication are not possible."""
    problem: str = ""
    """Why it could not be measured, in one line."""

    def as_dict(self) -> dict[str, Any]:
        """Return the measurement for JSON."""
        world = self.candidate.world
        where = {"launcher": world.launcher, "processes": world.size, "backend": world.backend}
        return {**where, **asdict(self), "candidate": str(self.candidate), "settings": dict(self.candidate.settings)}


def measure(candidate: Candidate, recipe: Path, flags: Sequence[str], steps: int) -> Measurement:
    """Run a recipe for ``steps`` optimizer steps, of which the first third is not counted, and measure it.

    Args:
        candidate: world and settings to run it with.
        recipe: a script that calls ``unitrain.init`` and takes ``--output-dir``.
        flags: further flags for it.
        steps: number of optimizer steps, at least 6; steps without communication come in addition.
    """
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        output = ("--output-dir", str(folder / "output"))
        program = [
            "-m",
            "unitrain.commands.bench.trial",
            temporary,
            str(steps),
            str(steps // 3),
            str(recipe),
            *flags,
            *output,
        ]
        world = candidate.world
        environment = {**small_mpi_environment(), **candidate.variables()}
        with running(launch_command(world.launcher, world.size, program), environment) as process:
            printed, _ = process.communicate()
        if process.returncode:
            return Measurement(candidate, problem=f"exit code {process.returncode}: {cause(printed)}")
        files = sorted(folder.glob("rank*.json"))
        records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    problem = _problem(candidate, records, steps)
    return Measurement(candidate, problem=problem) if problem else evaluate(candidate, records, skipped=steps // 3)


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


def evaluate(candidate: Candidate, records: Sequence[dict[str, Any]], skipped: int) -> Measurement:
    """Return the measurement of a candidate from the records of its ranks.

    Args:
        candidate: the candidate.
        records: the records of all ranks, as written by ``Recording``.
        skipped: number of first steps that are not counted.
    """
    ranks = [_differences(record["steps"][skipped:]) for record in records]
    steps = [mean(rank[i]["seconds"] for rank in ranks) for i in range(len(ranks[0]))]
    samples = sum(step["samples"] for rank in ranks for step in rank) / len(steps)
    typical = median(steps)
    if not (typical and samples):
        return Measurement(candidate, problem="the training loop does not iterate over strategy.dataloader")
    low, _, high = quantiles(steps, n=4)
    return Measurement(
        candidate, samples / typical, typical, (high - low) / 2 / typical, _split(typical, ranks, records)
    )


def _split(step: float, ranks: Sequence[list[dict[str, float]]], records: Sequence[dict[str, Any]]) -> Split | None:
    data = mean(median(one["data"] for one in rank) for rank in ranks)
    if len(ranks) == 1:
        return Split(data, step - data, 0.0, 0.0)
    alone = [_differences(record["alone"]) for record in records]
    if not all(alone):
        return None
    computing = [median(one["seconds"] - one["data"] for one in rank) for rank in alone]
    compute = min(mean(computing), step - data)
    idle = min(max(computing) - mean(computing), step - data - compute)
    return Split(data, compute, step - data - compute - idle, idle)


def _differences(totals: Sequence[Sequence[float]]) -> list[dict[str, float]]:
    """Return the differences of a rank's ``Totals`` over each step."""
    names = ("samples", "seconds", "data", "step")
    return [
        {name: now - before for name, now, before in zip(names, after, earlier, strict=True)}
        for earlier, after in pairwise(totals)
    ]
