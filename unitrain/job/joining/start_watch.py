"""The start watch: ends a process that waits for a rank which has ended before it joined the job.

The watchdog notices the end of a rank by its connection, and connects when all ranks have met. Until then,
communication libraries wait for all ranks, MPI_Init without a timeout, and launchers take a rank that exits with 0 for
one that has done its work.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from types import TracebackType

from unitrain.config import StrategyConfig
from unitrain.job.elastic import end_for_others
from unitrain.launch.detect import Launch
from unitrain.launch.local_ranks import LocalRanks

_CHECK_S = 1.0
# Of several ranks that wait, the first reports. The others report it, too, if they still run after this.
_FIRST_S = 3.0


class StartWatch:
    """Context manager that ends this process if a rank of this host has ended while the block waits for all ranks.

    A rank counts as ended if it has had no process for ``heartbeat_timeout_s``. Ranks of other hosts are not seen from
    here: if one of them never comes, the block is given up after one and a half times ``timeout_s``, when the libraries
    have not reported it after ``timeout_s``.
    """

    def __init__(self, launch: Launch, config: StrategyConfig) -> None:
        self._launch = launch
        self._timeout_s = config.timeout_s
        self._patience_s = min(config.heartbeat_timeout_s, config.timeout_s)
        self._ranks = LocalRanks(launch)
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
        # Launchers start all ranks of a host at once. Without one, a rank may come any time: only one that was seen can
        # be missed.
        all_started = self._launch.launcher != "env" and self._ranks.all_visible()
        seen_at = dict.fromkeys(range(self._launch.local_world_size), began) if all_started else {}
        while not self._joined.wait(min(_CHECK_S, self._patience_s / 5)):
            now = time.monotonic()
            present = self._ranks.present()
            seen_at.update(dict.fromkeys(present, now))
            if now - checked_at > self._patience_s / 2:  # this process was suspended, and perhaps the whole job
                seen_at = dict.fromkeys(seen_at, now)
                began += now - checked_at
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
        end_for_others(self._launch, f"unitrain: {me}: stopped because {reason}.")
