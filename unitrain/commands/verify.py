"""``unitrain verify``: checks that a model trains the same with every backend and launcher of this machine.

Every case is trained by a loop of plain PyTorch on one device, and by a strategy in each world that can be started.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from unitrain.communication.backend import backend_names, load_backend
from unitrain.device import pick_device
from unitrain.errors import UnitrainError, UsageError
from unitrain.launch.detect import Launch, detect
from unitrain.launch.local.launchers import local_launchers
from unitrain.testing.parity import plain, trial
from unitrain.testing.parity.cases import CASES, EXACT, STEPS
from unitrain.testing.parity.comparison import Verdict, cause, compare
from unitrain.testing.worlds import World, sees_world

# Three processes divide a batch unevenly. Two are enough for launchers that are slow to start.
_SIZES = {"python": (1,), "torchrun": (2, 3), "mpirun": (2, 3), "horovodrun": (2,), "srun": (2,)}
_LIMIT_S = 3600.0
_NONE: Mapping[str, Any] = {}


def verify(*, backend: str | None = None, device: str = "cpu") -> int:
    """Train a model in every mode and world, print the largest deviations, and return the exit code.

    The plain loop that it is compared with runs on the CPU, but for half precision, which it computes on the
    ``device``.

    Args:
        backend: the only backend to verify; None for all.
        device: cpu, cuda or cuda:N.

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
    worlds = find_worlds([backend] if backend else backend_names(), device)
    if not worlds:
        raise UsageError(
            f"backend {backend!r} works under no launcher found here: `unitrain doctor` shows what is missing."
        )
    console, verdicts = Console(), list[Verdict]()
    try:
        with Progress(console=console, transient=True) as progress:
            verdicts.extend(_trials(worlds, device, progress))
    finally:  # also of what was seen before an interruption
        _print(verdicts, console)
    failed = sum(not v.passed for v in verdicts)
    summary = f"{len(verdicts) - failed} of {len(verdicts)} trained the same as the plain loop"
    console.print(summary, style="red" if failed else "green")
    return 1 if failed else 0


def find_worlds(backends: Sequence[str], device: str = "cpu") -> list[World]:
    """Return the worlds that can be started here with any of ``backends``.

    Args:
        backends: names of backends.
        device: the setting ``device`` that the worlds must support.
    """
    return [
        world
        for launcher in local_launchers()
        for size in _SIZES.get(launcher, ())
        for backend in backends
        if works(world := World(backend, size, launcher), device)
    ]


def works(world: World, device: str, settings: Mapping[str, Any] = _NONE) -> bool:
    """Return whether the backend of a world supports the launcher, the device and settings.

    Args:
        world: the world.
        device: the setting ``device``.
        settings: further settings of the strategy.
    """
    try:
        # Asked of the backend itself, so that plug-ins are judged by their own rules.
        return sees_world(world.backend, str(world.launcher), world.processes, **{"device": device, **settings})
    except UnitrainError:
        return False


def _trials(worlds: Sequence[World], device: str, progress: Progress) -> Iterator[Verdict]:
    """Train every case in the plain loop and in each world, and yield a verdict for each case and world."""
    for name in [name for name in os.environ if name.startswith("UNITRAIN_")]:
        del os.environ[name]  # settings of this process would apply to the worlds
    task = progress.add_task("the plain loop", total=1 + len(worlds))
    reference = pick_device(device, Launch("python"))
    # Once: all worlds are compared with the same training.
    expected = {case.name: plain.train(case, reference) for case in CASES}
    for world in worlds:
        label = f"{world.launcher} x{world.processes}"
        progress.update(task, advance=1, description=f"{label}: {world.backend}")
        # DataParallel on several GPUs has no synchronised BatchNorm.
        cases = [case for case in CASES if works(world, device, case.settings)]
        printed = StringIO()
        try:
            with redirect_stdout(printed):
                ranks = world.run(trial.train_all, cases, world.backend, device, timeout=_LIMIT_S)
        except Exception as error:
            problem = cause(f"{printed.getvalue()}\n{type(error).__name__}: {error}")
            yield from (Verdict(label, world.backend, case, problems=(problem,)) for case in cases)
            continue
        for case, traces in zip(cases, zip(*ranks, strict=True), strict=True):
            yield compare(label, world.backend, case, expected[case.name], traces)


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
        exact = [v for v in cases if v.case.tolerance == EXACT]
        cells = [max(getattr(v, kind) for v in exact) for kind in ("loss", "gradient", "weight")]
        cells += [
            max((v.weight for v in cases if v.case.name.startswith(kind)), default=0.0) for kind in ("bf16", "fp16")
        ]
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
    parser.set_defaults(run=verify)
