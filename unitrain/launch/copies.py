"""A net below launcher detection: finds processes that are not the rank that their variables say, or lack.

These are copies that an unknown launcher has started, and a program that a rank has started, with its variables.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import psutil

from unitrain.errors import LaunchError, listed
from unitrain.launch.detect import Launch
from unitrain.launch.variables import OVERRIDE

_TOGETHER_S = 5.0
JOBS = ("PBS_JOBID", "LSB_JOBID", "LSB_JOBINDEX", "FLUX_JOB_ID", "SLURM_JOB_ID", "SUBMITIT_LOCAL_JOB_ID")
"""Variables with the id of a scheduler's job."""
_RANK = "_UNITRAIN_RANK"  # of a running job, with the variables that were read: a child inherits it


class _Process(NamedTuple):
    """A process that runs this command.

    Attributes:
        started: seconds since the epoch.
        parent: the id of its parent, 0 in another PID namespace.
        folder: its current folder.
    """

    started: float
    pid: int
    parent: int
    folder: str
    environ: dict[str, str]

    def is_copy_of(self, other: _Process) -> bool:
        """Whether both were started together, by one parent or in one job of a scheduler, with the same settings."""
        settings, other_settings = (
            {name: value for name, value in process.environ.items() if name in JOBS or name.startswith("UNITRAIN_")}
            for process in (self, other)
        )
        # Runs that a user starts by hand, one after the other, are further apart.
        together = abs(self.started - other.started) <= _TOGETHER_S
        one_source = self.parent == other.parent > 0 or any(name in settings for name in JOBS)
        return together and one_source and settings == other_settings and self.folder == other.folder


def refuse_copies() -> None:
    """Refuse to train if other processes of this host seem to be ranks of the same job.

    They have the same user, command line, folder and settings, and were started together. Processes that a program has
    forked are no copies, nor are workers of pytest and multiprocessing. Looking through the processes of a host takes
    milliseconds; only if there are copies does it wait, for seconds.

    Raises:
        LaunchError: this is one of several copies.
    """
    if sys.platform != "linux" or OVERRIDE in os.environ or not _runs_program() or not (copies := _copies()):
        return
    time.sleep(_TOGETHER_S)  # a copy that comes here a little later must still find this one
    raise LaunchError(
        f"{len(copies)} processes of this host (pids {listed(sorted(copies))}) run `{' '.join(sys.orig_argv)}`, and no "
        "variable of a known launcher is set: each would train the whole job alone. Start the job with torchrun, "
        "mpirun, horovodrun or srun, or give every process RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR "
        f"and MASTER_PORT. If these are separate runs, set {OVERRIDE}=python."
    )


def mark_rank(launch: Launch) -> None:
    """Let the programs that this process starts know that it is a rank of a job."""
    if launch.world_size > 1:
        os.environ[_RANK] = _marked(launch, os.getpid())


def unmark_rank() -> None:
    """Let programs that are started from now on know of no job: this process has left it."""
    os.environ.pop(_RANK, None)


def refuse_child_of_rank(launch: Launch) -> None:
    """Refuse to join a job as a second process with the variables of a rank, which has started this one.

    Raises:
        LaunchError: a rank has started this process, and no launcher between them has set other variables.
    """
    parent = os.environ.get(_RANK, "").partition(" ")[0]
    if parent in ("", str(os.getpid())) or os.environ[_RANK] != _marked(launch, int(parent)):
        return
    raise LaunchError(
        f"this process was started by rank {launch.rank} (pid {parent}) of a running job, and has that rank's "
        f"variables ({', '.join(launch.evidence)}): it would join the job as a second rank {launch.rank}, and "
        f"all ranks would wait. Set {OVERRIDE}=python for it to run alone, as in subprocess.run(command, "
        f'env={{**os.environ, "{OVERRIDE}": "python"}}), or start it by torchrun --standalone.'
    )


def _marked(launch: Launch, pid: int) -> str:
    return f"{pid} {' '.join(launch.evidence)}"


def _runs_program() -> bool:
    """Whether Python was started with a script or a module, and not with -c or stdin."""
    words = iter(sys.orig_argv[1:])
    for word in words:
        if word in ("-W", "-X"):
            next(words, None)
        elif word == "-" or word.startswith("-c"):
            return False
        elif not word.startswith("-") or word.startswith("-m"):
            return True
    return False


def _copies() -> list[int]:
    """Return the ids of this process and its copies; none if it has no copy."""
    by_pid = {process.pid: process for process in _processes(sys.orig_argv)}
    this = by_pid.pop(os.getpid(), None)
    if this is None or this.parent in by_pid:  # its command line was replaced, or its program has forked it
        return []
    # A child of a copy is a worker of it, and a child of this process is not another rank.
    roots = (process for process in by_pid.values() if process.parent not in (*by_pid, this.pid))
    copies = [process.pid for process in roots if process.is_copy_of(this)]
    return [this.pid, *copies] if copies else []


def _processes(command: list[str]) -> Iterator[_Process]:
    """Yield the processes of this user with a command line."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended
            if process.cmdline() == command and process.uids().effective == os.geteuid():
                yield _Process(process.create_time(), process.pid, process.ppid(), process.cwd(), process.environ())
