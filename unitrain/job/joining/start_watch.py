"""The start watch: ends a process that waits for a rank which has ended, or was stopped, before it joined the job.

The watchdog connects when all ranks have met. Until then, communication libraries wait for all ranks, MPI_Init without
a timeout, and launchers take a rank that exits with 0 for one that has done its work.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil

from unitrain.config import StrategyConfig
from unitrain.errors import CommunicationError
from unitrain.job.ending import end_for_others
from unitrain.launch.detect import Launch
from unitrain.launch.local_ranks import LocalRanks
from unitrain.process import has_thread, kill_stalled, name_thread, start_time

_CHECK_S = 1.0
# Tells the other processes of the host that this one has come.
_THREAD = "unitrain start"


@contextmanager
def watched_start(launch: Launch, config: StrategyConfig) -> Iterator[None]:
    """End this process if a rank of this host has ended or was stopped while the block waits for all ranks.

    A rank counts as ended if it has had no process for ``heartbeat_timeout_s``, and as stopped if a process of it was
    (SIGSTOP) for as long. Ranks of other hosts are not seen from here: for them, the block is given up after 1.5
    ``timeout_s``, if the libraries have not done so before.

    Args:
        launch: how this process was started. In a world of one, nothing is watched.
        config: has ``heartbeat_timeout_s`` and ``timeout_s``, in seconds.

    Raises:
        CommunicationError: the block's, with the ranks of this host that have not come.
    """
    if launch.world_size == 1:
        yield
        return
    watch = _StartWatch(launch, config)
    try:
        yield
    except CommunicationError as error:
        raise CommunicationError(f"{error}{watch.absent()}") from error
    finally:
        watch.end()


class _StartWatch:
    """Looks for the ranks of this host until all have joined, in a thread of every rank, and ends the process.

    Looking through the processes of a host takes milliseconds, so it is done about once a second.
    """

    def __init__(self, launch: Launch, config: StrategyConfig) -> None:
        self._launch = launch
        self._timeout_s = config.timeout_s
        self._patience_s = min(config.heartbeat_timeout_s, config.timeout_s)
        # By their processes, since nothing connects the ranks yet.
        self._ranks = LocalRanks(launch)
        self._rank = "rank" if launch.local_world_size == launch.world_size else "local rank"
        self._joined = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unitrain start watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the watch."""
        self._joined.set()
        self._thread.join()

    def absent(self) -> str:
        """Return a sentence on the ranks of this host that have not come, for a message; "" if there are none."""
        others = self._ranks.present()
        if not any(has_thread(process.pid, _THREAD) for process in others.pop(self._launch.local_rank)):
            return ""  # the system does not tell
        described = [
            f"{self._rank} {rank} ({', '.join(map(_described, processes))})"
            for rank, processes in sorted(others.items())
            if not any(has_thread(process.pid, _THREAD) for process in processes)
        ]
        return f" Not in unitrain.init on this host: {'; '.join(described)}." if described else ""

    def _run(self) -> None:
        """Check the ranks of this host again and again. Runs in the watch's thread."""
        name_thread(_THREAD)
        began = checked_at = time.monotonic()
        # Launchers start all ranks of a host at once. Without one, only a rank that was seen can be missed.
        all_started = self._launch.launcher != "env" and self._ranks.all_visible()
        # When each rank was last seen, and was not stopped.
        seen_at = dict.fromkeys(range(self._launch.local_world_size), began) if all_started else {}
        # Several checks must fit into the patience, which may be short in tests.
        while not self._joined.wait(min(_CHECK_S, self._patience_s / 5)):
            now = time.monotonic()
            present = self._ranks.present()
            stopped = {
                rank: process
                for rank, processes in present.items()
                for process in processes
                if rank != self._launch.local_rank and _is_stopped(process)
            }
            seen_at.update({rank: now for rank in present if rank not in stopped or rank not in seen_at})
            if now - checked_at > self._patience_s / 2:  # this process was suspended, and perhaps the whole job
                seen_at = dict.fromkeys(seen_at, now)
                began += now - checked_at
            checked_at = now
            lost = sorted(rank for rank, at in seen_at.items() if now - at > self._patience_s)
            if ended := [rank for rank in lost if rank not in stopped]:
                self._end(
                    f"{self._rank} {', '.join(map(str, ended))} has ended before it joined the job, maybe with exit "
                    "code 0: every rank must call unitrain.init() as often as the others, and may exit only after that"
                )
            elif lost:
                process = stopped[lost[0]]
                self._end(
                    f"{self._rank} {lost[0]} (pid {process.pid}) was stopped for {now - seen_at[lost[0]]:.0f} s before "
                    "it joined the job (by SIGSTOP, or the shell's job control), and is killed: start "
                    "the job again, with a longer heartbeat_timeout_s if ranks are stopped on purpose",
                    kills=[stopped[rank] for rank in lost],
                )
            elif now - began > 1.5 * self._timeout_s:
                self._end(
                    f"the ranks have not all joined the job within {now - began:.0f} s (timeout_s is "
                    f"{self._timeout_s:g}): check that all {self._launch.world_size} are running, and can reach one "
                    f"another.{self.absent()}"
                )

    def _end(self, reason: str, *, kills: Sequence[psutil.Process] = ()) -> None:
        """End this process, and kill processes that keep the job from ending."""
        for process in kills:
            with suppress(OSError):
                kill_stalled(process.pid, start_time(process.pid), aborts=False)
        me = f"rank {self._launch.rank} on {socket.gethostname()} (pid {os.getpid()})"
        end_for_others(f"unitrain: {me}: stopped because {reason.rstrip('.')}.")


def _is_stopped(process: psutil.Process) -> bool:
    """Return whether a process is stopped, and runs this Python: other programs may be stopped as long as they like."""
    try:
        return process.status() == psutil.STATUS_STOPPED and process.exe() == psutil.Process().exe()
    except (psutil.Error, OSError):  # it has ended
        return False


def _described(process: psutil.Process) -> str:
    """Return the id and the state of a process, for a message."""
    try:
        return f"pid {process.pid}, {process.status()}"
    except (psutil.Error, OSError):
        return f"pid {process.pid}, ended"
