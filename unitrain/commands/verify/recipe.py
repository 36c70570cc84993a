"""Verifies a recipe: it must write the same metrics in every world as in one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from unitrain.commands.launchers import launch_command, launch_environment
from unitrain.commands.toolchain import run_to_end
from unitrain.commands.verify.cases import EXACT, STEPS
from unitrain.commands.verify.comparison import Verdict, cause
from unitrain.commands.verify.worlds import World
from unitrain.errors import UsageError

_COMPARED = ("train_loss", "val_loss", "val_accuracy", "val_count")
_EXACT_FLAGS = ("--strategy.precision", "fp64", "--strategy.sync-batchnorm", "true")


def train(recipe: Path, world: World, folder: Path, flags: Sequence[str] = ()) -> list[dict[str, float]]:
    """Run a recipe for ``STEPS`` steps in float64 and return its ``metrics.jsonl``, a dict per epoch.

    Raises:
        UsageError: the recipe failed, or wrote no metrics.
    """
    run = ("--max-steps", str(STEPS), "--output-dir", str(folder), "--strategy.backend", world.backend, *_EXACT_FLAGS)
    command = launch_command(world.launcher, world.size, [str(recipe), *flags, *run])
    code, printed = run_to_end(*command, environment=launch_environment())
    metrics = folder / "metrics.jsonl"
    if code or not metrics.exists():
        what = f"failed with exit code {code}" if code else f"wrote no {metrics.name}"
        raise UsageError(
            f"{recipe} under {world} {what}: {cause(printed)}\nA recipe must take the flags --max-steps, --output-dir "
            "and those of the strategy, as unitrain.parse_command_line provides them, and write metrics.jsonl."
        )
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def compare(world: World, plain: Sequence[dict[str, float]], found: Sequence[dict[str, float]]) -> Verdict:
    """Return the relative deviations of a world's metrics from the metrics of one process."""
    if [row.get("step") for row in plain] != [row.get("step") for row in found]:
        return Verdict(str(world), world.backend, "recipe", EXACT, problems=("its metrics are of other steps",))
    worst = {
        name: max(abs(b[name] - a[name]) / max(abs(a[name]), 1e-300) for a, b in zip(plain, found, strict=True))
        for name in _COMPARED
        if all(name in row for row in (*plain, *found))
    }
    problems = tuple(f"{name} deviates by {worst[name]:.1e}" for name in _COMPARED if worst.get(name, 1.0) > EXACT)
    loss = max(worst.get("train_loss", 0.0), worst.get("val_loss", 0.0))
    return Verdict(str(world), world.backend, "recipe", EXACT, loss=loss, gradient=0.0, weight=0.0, problems=problems)
