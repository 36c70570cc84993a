"""The launchers: which of them are available on this host, and the command lines that start a script with them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from unitrain.launch.local.toolchain import find_mpi, find_program, small_mpi_environment


def local_launchers() -> list[str]:
    """Return the launchers that can start processes on this host.

    Runs ``mpirun --version``, since an MPI that does not start can't launch a job.
    """
    launchers = ["python", "torchrun"]
    if find_mpi() is not None:
        launchers.append("mpirun")
    if find_program("horovodrun") is not None:
        launchers.append("horovodrun")
    if find_program("srun") is not None and "SLURM_JOB_ID" in os.environ:
        launchers.append("srun")
    return launchers


def launch_command(launcher: str, processes: int, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs ``python ARGUMENTS`` in several processes on this host.

    Args:
        launcher: one of ``local_launchers()``.
        processes: the number of processes.
        arguments: Python's own: a script, or ``-m`` and a module, and flags.
    """
    count = str(processes)
    if launcher == "torchrun":
        # Not as torchrun: where PATH has another environment's, the ranks would be of that environment.
        module = [sys.executable, "-m", "torch.distributed.run"]
        return [*module, "--standalone", "--nproc-per-node", count, *arguments]
    options = {
        "mpirun": ["mpirun", "-np", count],
        "horovodrun": ["horovodrun", "--gloo", "-np", count],  # otherwise, it calls mpirun
        "srun": ["srun", "--overlap", "--ntasks", count],  # otherwise, it waits for the step that runs it
    }.get(launcher, [])
    if launcher == "mpirun" and str(find_mpi()).startswith("Open MPI"):
        options += ["--bind-to", "none"]  # Open MPI binds each of two processes to one core
    return [*options, sys.executable, *arguments]


def launch_environment() -> dict[str, str]:
    """Return the environment for small local runs: this one, without UniTrain's variables.

    Settings of the calling process, such as its backend, would otherwise apply to the runs.
    """
    return {name: value for name, value in small_mpi_environment().items() if not name.startswith("UNITRAIN_")}
