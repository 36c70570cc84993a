"""One candidate measured: its processes started, and what they wrote down turned into numbers."""

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
    """Where the time of a step goes, in seconds, on the mean over the ranks."""

    data: float
    """Waiting for the loader."""
    compute: float
    """Forward, backward and optimizer, as fast as they are without communication."""
    communication: float
    """What averaging gradients adds, as far as it is not hidden behind the backward."""
    idle: float
    """Waiting for the rank that computes the longest."""


@dataclass(frozen=True)
class Measurement:
    """What was found of one candidate."""

    candidate: Candidate
    samples_per_second: float = 0.0
    """Of all processes together."""
    step_seconds: float = 0.0
    """The median optimizer step."""
    spread: float = 0.0
    """Half of what the middle half of the steps span, relative to the median."""
    split: Split | None = None
    """None where steps without communication could not be taken."""
    problem: str = ""
    """Why there is nothing to be found, in one line."""

    def as_dict(self) -> dict[str, Any]:
        """Return the measurement for JSON."""
        world = self.candidate.world
        where = {"launcher": world.launcher, "processes": world.size, "backend": world.backend}
        return {**where, **asdict(self), "candidate": str(self.candidate), "settings": dict(self.candidate.settings)}


def measure(candidate: Candidate, recipe: Path, flags: Sequence[str], steps: int) -> Measurement:
    """Run a recipe for ``steps`` optimizer steps and some more, of which the first third is not counted.

    Args:
        candidate: where to run it, and with which settings.
        recipe: a script that calls ``unitrain.init`` and knows ``--output-dir``.
        flags: further flags for it.
        steps: how many; 6 or more.
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
            said, _ = process.communicate()
        if process.returncode:
            return Measurement(candidate, problem=f"ended with status {process.returncode}: {cause(said)}")
        files = sorted(folder.glob("rank*.json"))
        records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    problem = _problem(candidate, records, steps)
    return Measurement(candidate, problem=problem) if problem else evaluate(candidate, records, skipped=steps // 3)


def _problem(candidate: Candidate, records: Sequence[dict[str, Any]], steps: int) -> str:
    """Say why the records are not of this candidate, if they aren't."""
    if not records:
        return "it has called no unitrain.init()"
    if len(records) != candidate.world.size:
        return f"{len(records)} of {candidate.world.size} processes wrote down what they did"
    taken = len(records[0]["steps"])
    if taken < steps:
        return f"it took {taken} optimizer steps of {steps} in training loops over strategy.dataloader: give it more"
    for name, value in (("backend", candidate.world.backend), *candidate.settings):
        found = records[0]["settings"]
        for part in name.split("."):
            found = found[part]
        if found != value:
            return f"{name} is {found} by the recipe's own flags or code, which outrank what is tried here"
    return ""


def evaluate(candidate: Candidate, records: Sequence[dict[str, Any]], skipped: int) -> Measurement:
    """Return the numbers of a candidate from what its ranks wrote down.

    Args:
        candidate: what was measured.
        records: as ``Recording`` writes them, for each rank.
        skipped: steps at the beginning that are not counted.
    """
    ranks = [_differences(record["steps"][skipped:]) for record in records]
    steps = [mean(rank[i]["seconds"] for rank in ranks) for i in range(len(ranks[0]))]
    samples = sum(step["samples"] for rank in ranks for step in rank) / len(steps)
    typical = median(steps)
    if not (typical and samples):
        return Measurement(candidate, problem="its training loop does not iterate over a loader of the strategy")
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
    """Return what each step added to a rank's ``Totals``."""
    names = ("samples", "seconds", "data", "step")
    return [
        {name: now - before for name, now, before in zip(names, after, earlier, strict=True)}
        for earlier, after in pairwise(totals)
    ]
