"""The start watch: ends a process that waits for a rank which has ended before it joined the job.

The watchdog notices the end of a rank by its connection, and connects when all ranks have met. Until then,
communication libraries wait for all ranks, MPI_Init without a timeout, and launchers take a rank that exits with 0 for
one that has done its work.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from types import TracebackType

import psutil

from unitrain.config import StrategyConfig
from unitrain.launch.detect import Launch
from unitrain.process import exit_now

_LOCAL_RANKS = ("LOCAL_RANK", "HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
# What the ranks of a host have in common tells their job from others.
_OF_A_RANK = re.compile("RANK|PROCID|LOCALID")
_CHECK_S = 1.0
# Of several ranks that wait, the first reports. The others report it, too, if they still run after this.
_FIRST_S = 3.0


class StartWatch:
    """Context manager that ends this process if a rank of this host has ended while the block waits for all ranks.

    A rank counts as ended if it has had no process for ``heartbeat_timeout_s``. Ranks of other hosts are not seen from
    here: if one of them never comes, the block is given up after one and a half times ``timeout_s``, when the libraries
    have not reported it after ``timeout_s``.

    Args:
        launch: the place of this process.
        config: the settings.
    """

    def __init__(self, launch: Launch, config: StrategyConfig) -> None:
        self._launch = launch
        self._timeout_s = config.timeout_s
        self._patience_s = min(config.heartbeat_timeout_s, config.timeout_s)
        evidence = dict(one.split("=", 1) for one in launch.evidence)
        self._job = {name: value for name, value in evidence.items() if not _OF_A_RANK.search(name)}
        self._variable = next((name for name in _LOCAL_RANKS if name in evidence), None)
        self._joined = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unitrain start watch", daemon=True)

    def __enter__(self) -> None:
        if self._launch.world_size > 1:
            self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._joined.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        began = checked_at = time.monotonic()
        # Launchers start all ranks of a host at once. Where none is visible, a rank may come any time, or be in another
        # container: only one that was seen can be missed.
        all_started = self._launch.launcher not in ("env", "spawn") and self._sees_launcher()
        seen_at = dict.fromkeys(range(self._launch.local_world_size), began) if all_started else {}
        while not self._joined.wait(_CHECK_S):
            now = time.monotonic()
            present = self._present()
            seen_at.update(dict.fromkeys(present, now))
            if now - checked_at > self._patience_s / 2:  # this process was suspended, and perhaps the whole job
                seen_at = dict.fromkeys(seen_at, now)
            checked_at = now
            ended = [rank for rank, at in seen_at.items() if now - at > self._patience_s]
            if ended:
                of_host = "" if self._launch.local_world_size == self._launch.world_size else "local "
                ranks = ", ".join(map(str, sorted(ended)))
                self._end(
                    f"{of_host}rank {ranks} has ended before it joined the job, maybe with exit code 0: every rank "
                    "must call unitrain.init() as often as the others, and may exit only after that",
                    first=self._launch.local_rank == min(present),
                )
            if now - began > 1.5 * self._timeout_s:
                self._end(
                    f"the ranks have not all joined the job within {now - began:.0f} s (timeout_s is "
                    f"{self._timeout_s:g}): check that all {self._launch.world_size} processes are running, and that "
                    "their hosts can reach one another",
                    first=self._launch.rank == 0,
                )

    def _end(self, reason: str, *, first: bool) -> None:
        if self._joined.wait(0 if first else _FIRST_S):
            return
        me = f"rank {self._launch.rank} on {socket.gethostname()} (pid {os.getpid()})"
        exit_now(1, f"unitrain: {me}: stopped because {reason}.")

    def _present(self) -> set[int]:
        """Return the local ranks that have a process, this one included."""
        found = {self._launch.local_rank}
        for process in psutil.process_iter():
            rank = self._local_rank(process)
            if rank is not None:
                found.add(rank)
        return found

    def _local_rank(self, process: psutil.Process) -> int | None:
        """Return the local rank of a process of this job, or None."""
        if self._variable is None:
            return None
        try:
            environ = process.environ()
        except (psutil.Error, OSError):  # it has ended, or is another user's
            return None
        value = environ.get(self._variable, "")
        same_job = all(environ.get(name) == shared for name, shared in self._job.items())
        return int(value) if same_job and value.isdecimal() else None

    def _sees_launcher(self) -> bool:
        """Return whether an ancestor of this process is none of the ranks: a container of a single rank has none."""
        return any(self._local_rank(process) is None for process in psutil.Process().parents())
