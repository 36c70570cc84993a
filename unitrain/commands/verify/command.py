"""The command: starts every world that this host supports, compares, and reports the results."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from unitrain.commands.arguments import path
from unitrain.commands.verify.worlds import World, find_worlds, works
from unitrain.communication.backend import backend_names, load_backend
from unitrain.device import pick_device
from unitrain.errors import UsageError, writing
from unitrain.launch.detect import Launch, detect
from unitrain.launch.local.launchers import launch_command, launch_environment
from unitrain.launch.local.toolchain import run_to_end
from unitrain.testing.parity import plain
from unitrain.testing.parity.cases import AS_ONE_DEVICE, CASES, EXACT, STEPS, Trace
from unitrain.testing.parity.comparison import Verdict, cause, compare

_COMPARED = ("train_loss", "val_loss", "val_accuracy", "val_count")
_EXACT = {"precision": "fp64", **AS_ONE_DEVICE}


def verify(
    *,
    backend: str | None = None,
    device: str = "cpu",
    script: Path | None = None,
    flags: Sequence[str] = (),
    output: Path | None = None,
) -> int:
    """Train in every world, print the largest deviations, write JSON, and return the exit code.

    Without a ``script``, a built-in model is trained in every mode. The plain loop that it is compared with runs on the
    CPU, but for half precision, which it computes on the ``device``.

    Args:
        backend: the only backend to verify; None for all.
        device: cpu, cuda or cuda:N.
        script: a recipe to train in place of the built-in model.
        flags: flags for the recipe.
        output: a file for the deviations, as JSON.

    Returns:
        0 if every world trained the same, else 1.

    Raises:
        UsageError: a launcher has started this process, or no launcher works with the backend.
        ConfigError: the device is not available.
        BackendError: there is no such backend.
    """
    # Each process would start all worlds, and they would inherit the launcher's variables.
    if detect(os.environ).world_size > 1:
        raise UsageError("verify starts processes itself: run it alone, not under a launcher.")
    if backend is not None:
        load_backend(backend)
    pick_device(device, Launch("python"))  # raises if it is not available
    worlds = find_worlds([backend] if backend else backend_names(), device=device)
    if not worlds:
        raise UsageError(
            f"backend {backend!r} works under no launcher found here: `unitrain doctor` shows what is missing."
        )
    if output is not None:
        with writing(output):  # before minutes of training
            output.parent.mkdir(parents=True, exist_ok=True)
            output.open("a").close()
    console = Console()
    with Progress(console=console, transient=True) as progress, TemporaryDirectory() as temporary:
        folders = Path(temporary)
        verdicts = list(
            _recipe_trials(script, flags, worlds, folders, progress)
            if script
            else _trials(worlds, device, folders, progress)
        )
    _print(verdicts, console)
    if output is not None:
        with writing(output):
            output.write_text(json.dumps([{**asdict(v), "passed": v.passed} for v in verdicts], indent=1) + "\n")
        console.print(f"written: {output}")
    failed = sum(not v.passed for v in verdicts)
    reference = "one process" if script else "the plain loop"
    summary = f"{len(verdicts) - failed} of {len(verdicts)} trained the same as {reference}"
    console.print(summary, style="red" if failed else "green")
    return 1 if failed else 0


def _announced(worlds: Sequence[World], progress: Progress) -> Iterator[World]:
    """Yield the worlds, and show each in the progress bar while it trains."""
    task = progress.add_task("one process", total=1 + len(worlds))
    for world in worlds:
        progress.update(task, advance=1, description=f"{world}: {world.backend}")
        yield world


def _recipe_trials(
    script: Path, flags: Sequence[str], worlds: Sequence[World], folders: Path, progress: Progress
) -> Iterator[Verdict]:
    """Train a recipe in one process and in each world, and yield a verdict for each world."""
    alone = _train_recipe(script, World("python", 1, "single"), folders / "one process", flags)
    for world in _announced(worlds, progress):
        try:
            yield _compared(world, alone, _train_recipe(script, world, folders / f"{world} {world.backend}", flags))
        except UsageError as error:
            yield Verdict(str(world), world.backend, "recipe", EXACT, problems=(str(error),))


def _train_recipe(recipe: Path, world: World, folder: Path, flags: Sequence[str]) -> list[dict[str, float]]:
    """Run a recipe for ``STEPS`` steps in float64 and return its ``metrics.jsonl``, a dict per epoch."""
    # In lower case: the switches of the command line take true and false.
    exact = [f"--strategy.{name.replace('_', '-')}={value}".lower() for name, value in _EXACT.items()]
    run = ("--max-steps", str(STEPS), "--output-dir", str(folder), "--strategy.backend", world.backend, *exact)
    command = launch_command(world.launcher, world.size, [str(recipe), *flags, *run])
    code, printed = run_to_end(*command, environment=launch_environment())
    metrics = folder / "metrics.jsonl"
    if code or not metrics.exists():
        problem = f"failed with exit code {code}" if code else f"wrote no {metrics.name}"
        raise UsageError(
            f"{recipe} under {world} {problem}: {cause(printed)}\nA recipe must take the flags --max-steps, "
            "--output-dir and the strategy's, as unitrain.parse_command_line provides them, and write "
            "metrics.jsonl."
        )
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def _compared(world: World, alone: Sequence[dict[str, float]], metrics: Sequence[dict[str, float]]) -> Verdict:
    """Return the relative deviations of a world's metrics from the metrics of one process."""
    if [row.get("step") for row in alone] != [row.get("step") for row in metrics]:
        return Verdict(str(world), world.backend, "recipe", EXACT, problems=("its metrics are of other steps",))
    # Relative, since the metrics have different scales; the smallest float avoids a division by zero.
    worst = {
        name: max(abs(b[name] - a[name]) / max(abs(a[name]), 1e-300) for a, b in zip(alone, metrics, strict=True))
        for name in _COMPARED
        if all(name in row for row in (*alone, *metrics))
    }
    problems = tuple(f"{name} deviates by {worst[name]:.1e}" for name in _COMPARED if worst.get(name, 1.0) > EXACT)
    loss = max(worst.get("train_loss", 0.0), worst.get("val_loss", 0.0))
    return Verdict(str(world), world.backend, "recipe", EXACT, loss=loss, gradient=0.0, weight=0.0, problems=problems)


def _trials(worlds: Sequence[World], device: str, folders: Path, progress: Progress) -> Iterator[Verdict]:
    """Train every case in the plain loop and in each world, and yield a verdict for each case and world."""
    reference = pick_device(device, Launch("python"))
    # Once: all worlds are compared with the same training.
    expected = {case.name: plain.train(case, reference) for case in CASES}
    for world in _announced(worlds, progress):
        folder = folders / f"{world} {world.backend}"
        folder.mkdir()
        # DataParallel on several GPUs has no synchronised BatchNorm.
        cases = [case for case in CASES if works(world, device, case.settings)]
        program = ["-m", "unitrain.testing.parity.trial", str(folder), world.backend, device]
        command = launch_command(world.launcher, world.size, [*program, *(case.name for case in cases)])
        code, output = run_to_end(*command, environment=launch_environment())
        for case in cases:
            paths = [folder / f"{case.name}.{rank}.pt" for rank in range(world.size)]
            # A world may fail in one case, after it has finished others.
            if all(path.exists() for path in paths):
                ranks = [Trace(**torch.load(path, weights_only=True)) for path in paths]
                yield compare(str(world), world.backend, case, expected[case.name], ranks)
            else:
                failure = f"exit code {code}: {cause(output)}"
                yield Verdict(str(world), world.backend, case.name, case.tolerance, problems=(failure,))


def _print(verdicts: Sequence[Verdict], console: Console) -> None:
    """Print a line per world and backend, then the problems of each case that failed."""
    title = f"Largest deviation from the plain loop in {STEPS} steps"
    table = Table(title=title, caption="exact: the cases in fp64", box=None, pad_edge=False)  # fits 80 columns
    table.add_column("world", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    for column in ("loss,\nexact", "gradient,\nexact", "weight,\nexact", "weight,\nbf16", "weight,\nfp16", "same"):
        table.add_column(column, justify="right")
    for (world, backend), group in groupby(verdicts, key=lambda v: (v.world, v.backend)):
        cases = list(group)
        exact = [v for v in cases if v.tolerance == EXACT]
        cells = [max(getattr(v, kind) for v in exact) for kind in ("loss", "gradient", "weight")]
        cells += [max((v.weight for v in cases if v.case.startswith(kind)), default=0.0) for kind in ("bf16", "fp16")]
        same = sum(v.passed for v in cases)
        colour = "green" if same == len(cases) else "red"
        table.add_row(world, backend, *(f"{c:.0e}" for c in cells), f"[{colour}]{same}/{len(cases)}")
    console.print(table)
    # A launcher that fails gives one problem for all cases. It is printed once.
    printed: set[tuple[str, ...]] = set()
    for v in verdicts:
        if not v.passed and (not v.problems or v.problems not in printed):
            printed.add(v.problems)
            console.print(str(v), style="red", markup=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument("--backend", metavar="NAME", help="the only backend to verify (default: all)")
    parser.add_argument(
        "--device", default="cpu", help="device to train on: cpu, cuda or cuda:N (default: %(default)s)"
    )
    parser.add_argument(
        "--recipe", dest="script", type=path, metavar="PATH", help="recipe to train instead of the built-in model"
    )
    parser.add_argument("--output", type=path, metavar="FILE", help="write the deviations to this file as JSON")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="flags for the recipe, after --")
    parser.set_defaults(run=verify)
