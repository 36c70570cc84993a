"""The launchers that are available on this host, and their command lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from unitrain.commands.toolchain import find_mpi, find_program, small_mpi_environment


def local_launchers() -> list[str]:
    """Return the launchers that can start processes on this host."""
    found = ["python", "torchrun"]
    if find_mpi() is not None:
        found.append("mpirun")
    if find_program("horovodrun") is not None:
        found.append("horovodrun")
    if find_program("srun") is not None and "SLURM_JOB_ID" in os.environ:
        found.append("srun")
    return found


def launch_command(launcher: str, processes: int, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs ``python ARGUMENTS`` in several processes on this host.

    Args:
        launcher: one of ``local_launchers()``. horovodrun uses its gloo controller, since with MPI it calls mpirun.
        processes: number of processes.
        arguments: a script, or ``-m`` and a module, with its arguments.
    """
    count = str(processes)
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count, *arguments]
    starts: dict[str, list[str]] = {
        "python": [],
        "mpirun": [str(find_program("mpirun")), "-np", count],
        "horovodrun": [str(find_program("horovodrun")), "--gloo", "-np", count],
        "srun": ["srun", "--overlap", "-n", count],
    }
    return [*starts[launcher], sys.executable, *arguments]


def launch_environment() -> dict[str, str]:
    """Return the environment for small local runs: this one, without UniTrain's variables."""
    return {name: value for name, value in small_mpi_environment().items() if not name.startswith("UNITRAIN_")}
