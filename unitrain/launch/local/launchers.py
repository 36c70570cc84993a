"""The launchers: which of them are available on this host, and the command lines that start a script with them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from unitrain.errors import BackendError, UsageError
from unitrain.launch.allocation import Host
from unitrain.launch.local.toolchain import find_mpi, find_program, small_mpi_environment

_TORCHRUN_PORT = 29400
_NEEDED = {
    "mpirun": "pip install 'unitrain[mpi]' brings one",
    "horovodrun": "unitrain install-horovod adds it",
    "srun": "it is SLURM's, on the hosts of its cluster",
}
# For small runs on this host: horovodrun calls mpirun otherwise, and srun would wait for a step that runs already.
_LOCAL = {"horovodrun": ["--gloo"], "srun": ["--overlap"]}


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

    ``launcher`` is one of ``local_launchers()``. horovodrun uses its gloo controller.
    """
    if launcher == "python":
        return [sys.executable, *arguments]
    [[program, *options]] = launcher_options(launcher, [], processes)
    if launcher == "torchrun":
        return [program, *options, *arguments]
    return [program, *_LOCAL.get(launcher, []), *options, sys.executable, *arguments]


def launch_environment() -> dict[str, str]:
    """Return the environment for small local runs: this one, without UniTrain's variables."""
    return {name: value for name, value in small_mpi_environment().items() if not name.startswith("UNITRAIN_")}


def launcher_options(launcher: str, hosts: Sequence[Host], processes: int) -> list[list[str]]:
    """Return a launcher with its options, without what it starts; torchrun, once for each host.

    Without ``hosts``, it starts ``processes`` on this host.

    Raises:
        UsageError: the launcher can't start such a job.
        BackendError: it is not installed here.
    """
    if launcher == "torchrun":
        return _torchrun(hosts, processes)
    if find_program(launcher) is None:
        raise BackendError(f"{launcher} is not installed here: {_NEEDED[launcher]}.")
    if launcher == "srun":
        return [_srun(hosts, processes)]
    total = sum(host.processes for host in hosts) or processes
    where = ",".join(f"{host.name}:{host.processes}" for host in hosts)
    if launcher == "horovodrun":
        return [["horovodrun", "-np", str(total), *(["-H", where] if hosts else [])]]
    return [_mpirun(where, total)]


def _torchrun(hosts: Sequence[Host], processes: int) -> list[list[str]]:
    if not hosts:
        return [["torchrun", "--standalone", "--nproc-per-node", str(processes)]]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].name}:{_TORCHRUN_PORT}"]
    return [
        ["torchrun", "--nnodes", str(len(hosts)), "--nproc-per-node", str(host.processes), *meeting] for host in hosts
    ]


def _srun(hosts: Sequence[Host], processes: int) -> list[str]:
    if not hosts:
        return ["srun", "--ntasks", str(processes)]
    each = {host.processes for host in hosts}
    if len(each) > 1:
        raise UsageError(
            f"srun starts the same number of processes on every host, but --hosts asks for {sorted(each)}: give every "
            "host the same number, or use mpirun or horovodrun."
        )
    names = ",".join(host.name for host in hosts)
    return ["srun", "--nodes", str(len(hosts)), "--nodelist", names, "--ntasks-per-node", str(each.pop())]


def _mpirun(where: str, total: int) -> list[str]:
    """Return mpirun with the options of the installed one."""
    mpi = find_mpi()
    if mpi is None:
        raise BackendError(f"mpirun does not work here: unitrain doctor shows why, and {_NEEDED['mpirun']}.")
    start = ["mpirun", "-np", str(total)]
    if not mpi.implementation.startswith("Open MPI"):
        return [*start, *(["-hosts", where] if where else [])]
    # Open MPI binds each of two processes to one core, and passes no variables to other hosts, where it looks for
    # python in the PATH of ssh.
    settings = sorted(name for name in os.environ if name.startswith("UNITRAIN_"))
    passed = [word for name in ["PATH", *settings] for word in ("-x", name)]
    return [*start, *(["-H", where] if where else []), "--bind-to", "none", *(passed if where else [])]
