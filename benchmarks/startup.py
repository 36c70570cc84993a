"""Start-up: the cost of the import, and the time from the launcher's start to the end of the first step.

    python benchmarks/startup.py

The import is timed in new processes: torch alone, and torch with UniTrain. The first step is that of one layer, in
``first_step/hand_written.py`` and ``first_step/on_strategy.py``, which are started in turns. It includes the launcher,
imports, rendezvous, and copying rank 0's weights. Files are in the page cache by then.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shared.processes import ALONE, GLOO, HOROVOD_GLOO, HOROVOD_MPI, World, startable, world_name
from shared.report import Found, run, table
from shared.rounds import compared, shown_ratio, turns
from unitrain.launch.local.launchers import launch_command, launch_environment
from unitrain.launch.local.toolchain import running

HERE = Path(__file__).parent / "first_step"
HAND, OURS = "by hand", "UniTrain"
BACKEND = {"python": "single", "torchrun": "ddp", "mpirun": "horovod", "horovodrun": "horovod"}
# Rounds of each world; fewer for eight processes, which are slow on few cores.
WORLDS: dict[World, int] = {
    ALONE: 5, GLOO: 3, HOROVOD_MPI: 3, HOROVOD_GLOO: 3, ("torchrun", 8): 2, ("horovodrun", 8): 2,
}  # fmt: skip
SHORT_WORLDS: dict[World, int] = {GLOO: 2}
IMPORT_ROUNDS, SHORT_IMPORT_ROUNDS = 7, 2
IMPORTS = {"import torch": "import torch", "import torch, unitrain": "import torch, unitrain"}


def seconds_to_import(statement: str) -> float:
    """Return the seconds that an import takes in a new process."""
    code = f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def seconds_to_first_step(world: World, name: str) -> float:
    """Return the seconds from the launcher's start to the end of rank 0's first step.

    Raises:
        RuntimeError: the job failed; the message has its output.
    """
    launcher, processes = world
    with tempfile.TemporaryDirectory() as folder:
        stamp = Path(folder, "stamp")
        script = ["hand_written.py", BACKEND[launcher]] if name == HAND else ["on_strategy.py"]
        command = launch_command(launcher, processes, [str(HERE / script[0]), *script[1:], str(stamp)])
        start = time.time()
        with running(command, launch_environment()) as process:
            printed, _ = process.communicate(timeout=300)
        if process.returncode != 0 or not stamp.exists():
            raise RuntimeError(f"{script[0]} exited with code {process.returncode}:\n{printed}")
        return float(stamp.read_text()) - start


def measure(short: bool) -> Found:
    imports: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for counts, name in turns(list(IMPORTS), SHORT_IMPORT_ROUNDS if short else IMPORT_ROUNDS):
        seconds = seconds_to_import(IMPORTS[name])
        if counts:
            imports[name].append(seconds)
    lengths = SHORT_WORLDS if short else WORLDS
    worlds = []
    for world in startable(*lengths):
        first_steps: dict[str, list[float]] = {HAND: [], OURS: []}
        for counts, name in turns(list(first_steps), lengths[world]):
            seconds = seconds_to_first_step(world, name)
            if counts:
                first_steps[name].append(seconds)
        worlds.append((world, compared(first_steps, HAND)))
    return {"imports": compared(imports, "import torch"), "worlds": worlds}


def tables(found: Found) -> str:
    imports = [
        [name, f"{one['seconds']:.2f}", f"{one['over_s'] * 1e3:+.0f}", shown_ratio(one)]
        for name, one in found["imports"].items()
    ]
    worlds = [
        [
            world_name(world), f"{ways[HAND]['seconds']:.2f}", f"{ways[OURS]['seconds']:.2f}",
            f"{ways[OURS]['over_s'] * 1e3:+.0f}", shown_ratio(ways[OURS]),
        ]
        for world, ways in found["worlds"]
    ]  # fmt: skip
    return "\n".join(
        [
            table(["", "s", "over torch, ms", "ratio (quartiles)"], imports),
            table(["launch to first step", "by hand, s", "UniTrain, s", "over, ms", "ratio (quartiles)"], worlds),
        ]
    )


if __name__ == "__main__":
    run(measure, tables)
