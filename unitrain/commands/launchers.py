"""Command lines that start so many processes on this host, for each launcher that is found here."""

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
    """Return the command that starts ``python ARGUMENTS`` in so many processes on this host.

    Args:
        launcher: one of ``local_launchers()``; horovodrun is taken with its gloo controller, as its MPI controller is
            mpirun.
        processes: how many.
        arguments: a script, or ``-m`` and a module, and what it is given.
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
    """Return this environment, fit for small local runs, without settings of UniTrain's."""
    return {name: value for name, value in small_mpi_environment().items() if not name.startswith("UNITRAIN_")}
