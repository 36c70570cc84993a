"""The command: start every world that this host can, compare, and say what was found."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from unitrain.config import StrategyConfig
from unitrain.errors import UnitrainError, UsageError
from unitrain.launch import Launch, detect
from unitrain.launching import launch_command, launch_environment, local_launchers
from unitrain.registry import backend_names, load_backend
from unitrain.toolchain import running
from unitrain.verify import plain
from unitrain.verify.cases import CASES, EXACT, STEPS
from unitrain.verify.comparison import Verdict, compare
from unitrain.verify.trace import Trace

_SIZES = {"python": (1,), "torchrun": (2, 3), "mpirun": (2, 3), "horovodrun": (2,), "srun": (2,)}


@dataclass(frozen=True)
class World:
    """Processes that one launcher starts on this host, and the backends that would see them as one job."""

    launcher: str
    size: int
    backends: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.launcher} x{self.size}"


def find_worlds(backends: Sequence[str]) -> list[World]:
    """Return the worlds that can be started here and serve any of ``backends``."""
    worlds = []
    for launcher in local_launchers():
        for size in _SIZES[launcher]:
            launch = Launch(launcher, world_size=size, local_world_size=size)
            serving = tuple(name for name in backends if _serves(name, launch))
            if serving:
                worlds.append(World(launcher, size, serving))
    return worlds


def _serves(backend: str, launch: Launch) -> bool:
    try:
        found = load_backend(backend)
        found.check(StrategyConfig(backend=backend, device="cpu"), launch)
    except UnitrainError:
        return False
    return found.expected_world(launch) == launch.world_size


def verify(*, backend: str | None = None, output: Path | None = None) -> int:
    """Train every case everywhere, print the largest deviations, write JSON, and return the exit status.

    Args:
        backend: the only one to put on trial; default: all that are installed.
        output: where the verdicts go as JSON.

    Raises:
        UsageError: this process is itself one of a job, or nothing here serves the backend.
    """
    if detect(os.environ).world_size > 1:
        raise UsageError("verify starts processes itself: run it alone, not under a launcher.")
    if backend is not None:
        load_backend(backend)
    worlds = find_worlds([backend] if backend else backend_names())
    if not worlds:
        raise UsageError(f"no launcher found here serves backend {backend!r}: `unitrain doctor` says what is missing.")
    console = Console()
    verdicts = list(_trials(worlds, console))
    _print(verdicts, console)
    if output is not None:
        output.write_text(json.dumps([v.as_dict() for v in verdicts], indent=1) + "\n")
        console.print(f"written: {output}")
    failed = sum(not v.passed for v in verdicts)
    console.print(
        f"{len(verdicts) - failed} of {len(verdicts)} trained as the plain loop did", style="red" if failed else "green"
    )
    return 1 if failed else 0


def _trials(worlds: Sequence[World], console: Console) -> Iterator[Verdict]:
    with Progress(console=console, transient=True) as progress, tempfile.TemporaryDirectory() as temporary:
        task = progress.add_task("plain loop", total=1 + len(worlds))
        expected = {case.name: plain.train(case) for case in CASES}
        for world in worlds:
            progress.update(task, advance=1, description=f"{world}: {', '.join(world.backends)}")
            folder = Path(temporary, str(world))
            folder.mkdir()
            said = _run(world, folder)
            for backend in world.backends:
                for case in CASES:
                    traces = _read(folder, backend, case.name, world.size, said)
                    yield compare(str(world), backend, case, expected[case.name], traces)


def _run(world: World, folder: Path) -> str:
    """Start the world; return the end of what it printed, or an empty string where all went well."""
    arguments = ["-m", "unitrain.verify.trial", str(folder), *world.backends]
    with running(launch_command(world.launcher, world.size, arguments), launch_environment()) as process:
        text, _ = process.communicate()
    return "" if process.returncode == 0 else f"{world} ended with status {process.returncode}: {text.strip()[-2000:]}"


def _read(folder: Path, backend: str, case: str, size: int, said: str) -> list[Trace]:
    failed = [Trace.load(path) for path in sorted(folder.glob(f"{backend}.{case}.failed*.pt"))]
    paths = [folder / f"{backend}.{case}.{rank}.pt" for rank in range(size)]
    if failed:
        return failed
    if not all(path.exists() for path in paths):
        return [Trace(error=said or "the case was not finished")]
    return [Trace.load(path) for path in paths]


def _print(verdicts: Sequence[Verdict], console: Console) -> None:
    """Print a line for each world and backend, then what is wrong with each case that failed."""
    table = Table(title=f"Largest deviation from the plain loop in {STEPS} steps", caption="exact: the cases in fp64")
    table.add_column("world")
    table.add_column("backend")
    for column in ("loss, exact", "gradient, exact", "weight, exact", "weight, bf16", "weight, fp16", "same"):
        table.add_column(column, justify="right")
    for (world, backend), group in groupby(verdicts, key=lambda v: (v.world, v.backend)):
        cases = list(group)
        exact = [v for v in cases if v.tolerance == EXACT]
        cells = [max(getattr(v, kind) for v in exact) for kind in ("loss", "gradient", "weight")]
        cells += [max(v.weight for v in cases if v.case.startswith(kind)) for kind in ("bf16", "fp16")]
        same = sum(v.passed for v in cases)
        colour = "green" if same == len(cases) else "red"
        table.add_row(world, backend, *(f"{c:.0e}" for c in cells), f"[{colour}]{same} of {len(cases)}")
    console.print(table)
    for v in verdicts:
        if not v.passed:
            numbers = f"loss {v.loss:.1e}, gradient {v.gradient:.1e}, weight {v.weight:.1e}, allowed {v.tolerance:.0e}"
            console.print(
                f"{v.world}, {v.backend}, {v.case}: {'; '.join([numbers, *v.problems])}", style="red", markup=False
            )


if __name__ == "__main__":
    sys.exit(verify())
