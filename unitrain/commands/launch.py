"""``unitrain launch``: the command that starts a script on one or several hosts with a launcher, run or printed."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from unitrain.commands.toolchain import find_mpi, find_program, search_path
from unitrain.errors import BackendError, UsageError

_TORCHRUN_PORT = 29400
_NEEDED = {
    "mpirun": "pip install 'unitrain[mpi]' brings one",
    "horovodrun": "unitrain install-horovod adds it",
    "srun": "it is SLURM's, on the hosts of its cluster",
}


@dataclass(frozen=True)
class Host:
    """A host of a job, and the number of processes on it."""

    name: str
    processes: int


def parse_hosts(text: str) -> list[Host]:
    """Return the hosts in a list such as ``node1:8,node2:8``, as mpirun and horovodrun take it.

    Raises:
        UsageError: it is not such a list, or names a host twice.
    """
    hosts = []
    for part in text.split(","):
        found = re.fullmatch(r"([\w.-]+)(?::([1-9]\d{0,5}))?", part.strip(), re.ASCII)
        if found is None:
            raise UsageError(
                f"--hosts is {text!r}, but must be names of hosts with their numbers of processes, such as "
                "node1:8,node2:8."
            )
        hosts.append(Host(found[1], int(found[2] or 1)))
    names = [host.name for host in hosts]
    if len(set(names)) < len(names):
        raise UsageError(f"--hosts is {text!r}, but names a host twice: give each its number of processes once.")
    return hosts


def commands(launcher: str, hosts: Sequence[Host], processes: int, arguments: Sequence[str]) -> list[list[str]]:
    """Return the command that starts a job; with torchrun, one for each host.

    Args:
        launcher: torchrun, mpirun, horovodrun or srun.
        hosts: the hosts; none for this host only.
        processes: number of processes on this host, if there are no hosts.
        arguments: the script and its flags.

    Raises:
        UsageError: the launcher can't start such a job.
        BackendError: it is not installed here.
    """
    total = sum(host.processes for host in hosts) or processes
    if launcher == "torchrun":
        return _torchrun(hosts, processes, arguments)
    if find_program(launcher) is None:
        raise BackendError(f"{launcher} is not installed here: {_NEEDED[launcher]}.")
    script = ["python", *arguments]
    if launcher == "srun":
        return [[*_srun(hosts, total), *script]]
    where = ",".join(f"{host.name}:{host.processes}" for host in hosts)
    if launcher == "horovodrun":
        return [["horovodrun", "-np", str(total), *(["-H", where] if hosts else []), *script]]
    return [[*_mpirun(where, total), *script]]


def _torchrun(hosts: Sequence[Host], processes: int, arguments: Sequence[str]) -> list[list[str]]:
    if not hosts:
        return [["torchrun", "--standalone", "--nproc-per-node", str(processes), *arguments]]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].name}:{_TORCHRUN_PORT}"]
    return [
        ["torchrun", "--nnodes", str(len(hosts)), "--nproc-per-node", str(host.processes), *meeting, *arguments]
        for host in hosts
    ]


def _srun(hosts: Sequence[Host], total: int) -> list[str]:
    if not hosts:
        return ["srun", "--ntasks", str(total)]
    each = {host.processes for host in hosts}
    if len(each) > 1:
        raise UsageError(
            f"srun starts the same number of processes on every host, but --hosts asks for {sorted(each)}: give every "
            "host the same number, or use mpirun or horovodrun."
        )
    names = ",".join(host.name for host in hosts)
    return ["srun", "--nodes", str(len(hosts)), "--nodelist", names, "--ntasks-per-node", str(each.pop())]


def _mpirun(where: str, total: int) -> list[str]:
    """Return mpirun with the options of the installed one. Variables reach other hosts only if they are named."""
    mpi = find_mpi()
    if mpi is None:
        raise BackendError(f"mpirun does not work here: unitrain doctor shows why, and {_NEEDED['mpirun']}.")
    names = sorted(name for name in os.environ if name.startswith("UNITRAIN_"))
    if mpi.implementation.startswith("Open MPI"):
        passed = [word for name in names for word in ("-x", name)]
        return ["mpirun", "-np", str(total), *(["-H", where] if where else []), "--bind-to", "none", *passed]
    passed = ["-genvlist", ",".join(names)] if names and where else []
    return ["mpirun", "-np", str(total), *(["-hosts", where] if where else []), *passed]


def launch(launcher: str, hosts: str | None, processes: int, arguments: Sequence[str], *, dry_run: bool) -> int:
    """Run a job, which replaces this process, or print the command that starts it, and return the exit code.

    Raises:
        UsageError: an argument is wrong, or this launcher must be started on each host.
        BackendError: the launcher is not installed here.
    """
    if processes < 1:
        raise UsageError(f"--processes is {processes}, but must be at least 1.")
    listed = parse_hosts(hosts) if hosts is not None else []
    made = commands(launcher, listed, processes, arguments)
    if not dry_run:
        if len(made) > 1:
            raise UsageError(
                f"{launcher} is started on each host. --dry-run prints the commands; or use mpirun, horovodrun or srun."
            )
        os.environ["PATH"] = search_path()
        os.execvp(made[0][0], made[0])
    for number, command in enumerate(made):
        if len(made) > 1:
            print(f"# on {listed[number].name}")
        print(shlex.join(command))
    return 0
