"""Calls a function of a benchmark's script in new processes under a launcher."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unitrain.launch.local.launchers import launch_command, launch_environment, local_launchers
from unitrain.launch.local.toolchain import running

# Launcher, and number of processes.
World = tuple[str, int]
ALONE: World = ("python", 1)
GLOO: World = ("torchrun", 2)
HOROVOD_MPI: World = ("mpirun", 2)
HOROVOD_GLOO: World = ("horovodrun", 2)
CALLED = {
    "python": "one process",
    "torchrun": "gloo (torchrun)",
    "mpirun": "Horovod on MPI (mpirun)",
    "horovodrun": "Horovod on gloo (horovodrun --gloo)",
}


def world_name(world: Sequence[Any]) -> str:
    """Return the name of a world in tables. The world may be a list, as JSON makes of it."""
    launcher, processes = world
    return CALLED[launcher] if processes == 1 else f"{processes} x {CALLED[launcher]}"


def startable(*worlds: World) -> list[World]:
    """Return the worlds whose launcher is installed, and print the missing launchers on stderr."""
    found = local_launchers()
    for launcher, _ in worlds:
        if launcher not in found:
            print(f"{launcher} is not installed: skipped.", file=sys.stderr)
    return [world for world in worlds if world[0] in found]


def in_processes(
    world: World,
    part: Callable[..., Any],
    *,
    environment: Mapping[str, str] | None = None,
    deadline: float = 900,
    **arguments: Any,
) -> Any:
    """Call ``part`` in each process of a world, and return the result of the rank whose result is not None.

    Args:
        world: the launcher and the number of processes.
        part: a function of the running script, which must call ``call_part()``.
        environment: additional environment variables of the processes.
        deadline: time limit in seconds.
        **arguments: arguments of the part, serialisable to JSON.

    Raises:
        RuntimeError: the processes failed; the message has their output.
        subprocess.TimeoutExpired: they did not end in time.
    """
    if world == ALONE and environment is None and "--short" in sys.argv:
        return json.loads(json.dumps(part(**arguments)))  # saves the start of a process
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        script = str(Path(part.__code__.co_filename).resolve())
        called = [script, "--part", part.__name__, json.dumps(arguments), str(result)]
        command = launch_command(*world, called)
        print(f"{Path(script).stem}: {part.__name__} in {world_name(world)} {arguments or ''}", file=sys.stderr)
        with running(command, {**launch_environment(), **(environment or {})}) as process:
            printed, _ = process.communicate(timeout=deadline)
        if process.returncode != 0 or not result.exists():
            raise RuntimeError(f"{part.__name__} exited with code {process.returncode}:\n{printed}")
        return json.loads(result.read_text())


def call_part() -> bool:
    """If ``in_processes`` started this process, run the part. Return whether it did."""
    if sys.argv[1:2] != ["--part"]:
        return False
    name, arguments, result = sys.argv[2:]
    returned = getattr(sys.modules["__main__"], name)(**json.loads(arguments))
    if returned is not None:
        Path(result).write_text(json.dumps(returned))
    return True
