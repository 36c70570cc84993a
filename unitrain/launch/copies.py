"""A net below launcher detection: finds processes that are not the rank that their variables say, or lack.

These are copies that an unknown launcher has started, and a program that a rank has started, with its variables.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from unitrain.errors import LaunchError, listed
from unitrain.launch.detect import Launch
from unitrain.launch.variables import OVERRIDE

_TOGETHER_S = 5.0
JOBS = ("PBS_JOBID", "LSB_JOBID", "LSB_JOBINDEX", "FLUX_JOB_ID", "SLURM_JOB_ID", "SUBMITIT_LOCAL_JOB_ID")
"""Variables with the id of a scheduler's job."""
# A refused process gets this name, which its copies see in /proc.
_REFUSED = "unitrain: copy"
_RANK = "_UNITRAIN_RANK"  # of a running job, with the variables that were read: a child inherits it
_PATIENCE_S, _POLL_S = 10.0, 0.05


class _Process(NamedTuple):
    """A process that runs this command. The first field is its start, so that a list is sorted by that.

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
    forked are no copies, nor are workers of pytest and multiprocessing. All but the first copy raise SystemExit.
    Looking through the processes of a host takes milliseconds; only if there are copies does it wait, for seconds.

    Raises:
        LaunchError: this is the first of several copies.
    """
    if sys.platform != "linux" or OVERRIDE in os.environ or not _runs_program() or not (copies := _copies()):
        return
    # In the order of their start, which all copies see in the same way.
    pids = [copy.pid for copy in copies]
    # One of them prints the message: the first, unless it has already ended.
    place = pids.index(os.getpid())
    if _wait_until_refused(pids[:place] + pids[place + 1 :]) & set(pids[:place]):
        raise SystemExit(LaunchError.exit_code)
    raise LaunchError(_message(copies[place], copies))


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


def _copies() -> list[_Process]:
    """Return this process and its copies, in the order of their start; nothing if it has none."""
    by_pid = {process.pid: process for process in _processes(sys.orig_argv)}
    this = by_pid.pop(os.getpid(), None)
    if this is None or this.parent in by_pid:  # its command line was replaced, or its program has forked it
        return []
    # A child of a copy is a worker of it, and a child of this process is not another rank.
    roots = (process for process in by_pid.values() if process.parent not in (*by_pid, this.pid))
    copies = [process for process in roots if process.is_copy_of(this)]
    return sorted([this, *copies]) if copies else []


def _processes(command: list[str]) -> Iterator[_Process]:
    """Yield the processes of this user with a command line."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended
            if process.cmdline() == command and process.uids().effective == os.geteuid():
                yield _Process(process.create_time(), process.pid, process.ppid(), process.cwd(), process.environ())


def _name(pid: int) -> str:
    """Return the name of a process; an empty string if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _wait_until_refused(others: list[int]) -> set[int]:
    """Wait until the other copies have come here or ended, and return those that came. Later they would find none."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(_REFUSED)
    refused: set[int] = set()
    end = time.monotonic() + _PATIENCE_S
    while any(_name(pid) not in ("", _REFUSED) for pid in others) and time.monotonic() < end:
        refused.update(pid for pid in others if _name(pid) == _REFUSED)
        time.sleep(_POLL_S)
    refused.update(pid for pid in others if _name(pid) == _REFUSED)
    time.sleep(2 * _POLL_S)  # they look for this one, too
    return refused


def _message(this: _Process, copies: list[_Process]) -> str:
    """Return the error's message, with the variables that may be the unknown launcher's rank and world size."""
    # The launcher's rank is a number that differs between the copies.
    numbers = [
        f"{name}={value}"
        for name, value in sorted(this.environ.items())
        if value.isdigit() and any(copy.environ.get(name) != value for copy in copies)
    ]
    differ = f" Numbers that tell this one from the others: {', '.join(numbers[:6])}." if numbers else ""
    return (
        f"{len(copies)} processes of this host (pids {listed([copy.pid for copy in copies])}; this one started by "
        f"{_name(this.parent)!r}) run `{' '.join(sys.orig_argv)}`, and no variable of a known launcher is set: each "
        f"would train the whole job alone.{differ} Start the job with torchrun, mpirun, horovodrun or srun, or give "
        "every process RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. If these are "
        f"separate runs, set {OVERRIDE}=python."
    )
