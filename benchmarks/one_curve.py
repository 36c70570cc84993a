"""One curve: the ResNet recipe's loss under every launcher, and by how much the curves differ.

    python benchmarks/one_curve.py

The recipe trains on handwritten digits in float64, with synchronised BatchNorm: on one process, and on two under every
other launcher. srun needs SLURM, which is started for it as in the tests unless the benchmark runs in a job of SLURM's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from shared.report import Found, run, table
from unitrain.launch.local.launchers import launch_command, launch_environment, local_launchers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "resnet.py"
FLAGS = ["--strategy.precision", "fp64", "--strategy.sync-batchnorm", "true", "--strategy.device", "cpu"]
SPAWN = "import sys; from unitrain.recipes.resnet import main; import unitrain; unitrain.spawn(main, nprocs=2)"
SHOWN = ("train_loss", "val_loss")


def started(stack: ExitStack, launcher: str, arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that start the recipe."""
    environment = launch_environment()
    if launcher == "spawn":
        return [sys.executable, "-c", SPAWN, *arguments], environment
    if launcher == "srun" and launcher not in local_launchers():
        sys.path.append(str(ROOT / "tests" / "support" / "hosts"))
        from slurm import local_slurm

        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        slurm = stack.enter_context(local_slurm(folder))
        return [*slurm.srun, "-n", "2", sys.executable, str(RECIPE), *arguments], {**environment, **slurm.env}
    return launch_command(launcher, 1 if launcher == "python" else 2, [str(RECIPE), *arguments]), environment


def curve(launcher: str, epochs: int) -> list[dict[str, float]]:
    """Train under a launcher and return the metrics of each epoch."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command, environment = started(stack, launcher, [*FLAGS, "--epochs", str(epochs), "--output-dir", str(folder)])
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        if done.returncode:
            raise RuntimeError(f"{launcher} exited with code {done.returncode}:\n{done.stderr}")
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def launchers() -> list[str]:
    """Return the launchers that can be used here, and print the others on stderr."""
    sys.path.append(str(ROOT / "tests" / "support" / "hosts"))
    from slurm import slurm_missing

    found = [*local_launchers(), "spawn"]
    if "srun" not in found and slurm_missing() is None:
        found.append("srun")
    missing = {"mpirun", "horovodrun", "srun"} - set(found)
    if missing:
        print(f"not installed, and left out: {', '.join(sorted(missing))}", file=sys.stderr)
    return found


def measure(short: bool) -> Found:
    return {"curves": {launcher: curve(launcher, 2 if short else 10) for launcher in launchers()}}


def _differences(found: Found, launcher: str) -> list[float]:
    """Return how much the losses of each epoch differ from those of one process, relative to them."""
    alone, own = found["curves"]["python"], found["curves"][launcher]
    return [max(abs(line[name] / other[name] - 1) for name in SHOWN) for line, other in zip(own, alone, strict=True)]


def tables(found: Found) -> str:
    rows = [
        [
            f"`{launcher}`", lines[-1]["backend"], lines[-1]["world_size"], f"{lines[-1]['train_loss']:.12f}",
            f"{lines[-1]['val_loss']:.12f}", f"{lines[-1]['val_accuracy']:.2%}",
            f"{max(_differences(found, launcher)):.0e}",
        ]
        for launcher, lines in found["curves"].items()
    ]  # fmt: skip
    head = ["launcher", "backend", "processes", "training loss", "validation loss", "accuracy", "largest difference"]
    return table(head, rows)


def plot(found: Found, figure: Figure) -> None:
    losses, differences = figure.subplots(1, 2)
    widths = range(2 * len(found["curves"]), 0, -2)
    for (launcher, lines), width in zip(found["curves"].items(), widths, strict=True):
        epochs = range(1, len(lines) + 1)
        label = f"{launcher}, {lines[0]['backend']} x {lines[0]['world_size']}"
        losses.semilogy(epochs, [line["val_loss"] for line in lines], linewidth=width, label=label)
        if launcher != "python":
            differences.semilogy(epochs, [max(1e-17, one) for one in _differences(found, launcher)], label=label)
    losses.set(xlabel="epoch", ylabel="validation loss")
    losses.legend(fontsize=8)
    differences.axhline(1e-9, color="black", linestyle=":", linewidth=1)
    differences.set(xlabel="epoch", ylabel="relative difference from one process", ylim=(1e-17, 1e-3))
    differences.legend(fontsize=8)
    figure.set_size_inches(10, 4)


if __name__ == "__main__":
    os.chdir(ROOT)
    run(measure, tables, plot)
