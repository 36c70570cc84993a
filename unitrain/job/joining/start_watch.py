"""The start watch: ends a process that waits for a rank which has ended before it joined the job.

The watchdog connects when all ranks have met. Until then, communication libraries wait for all ranks, MPI_Init without
a timeout, and launchers take a rank that exits with 0 for one that has done its work.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from unitrain.config import StrategyConfig
from unitrain.job.ending import end_for_others
from unitrain.launch.detect import Launch
from unitrain.launch.local_ranks import LocalRanks

_CHECK_S = 1.0
# Of several ranks that wait, the first reports. The others report it, too, if they still run after this.
_FIRST_S = 3.0


@contextmanager
def watched_start(launch: Launch, config: StrategyConfig) -> Iterator[None]:
    """End this process if a rank of this host has ended while the block waits for all ranks.

    A rank counts as ended if it has had no process for ``heartbeat_timeout_s``. Ranks of other hosts are not seen from
    here: for them, the block is given up after 1.5 ``timeout_s``, if the libraries have not done so before.
    """
    if launch.world_size == 1:
        yield
        return
    joined = threading.Event()
    thread = threading.Thread(target=_watch, args=(launch, config, joined), name="unitrain start watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        joined.set()
        thread.join()


def _watch(launch: Launch, config: StrategyConfig, joined: threading.Event) -> None:
    patience_s = min(config.heartbeat_timeout_s, config.timeout_s)
    ranks = LocalRanks(launch)
    began = checked_at = time.monotonic()
    # Launchers start all ranks of a host at once. Without one, only a rank that was seen can be missed.
    all_started = launch.launcher != "env" and ranks.all_visible()
    seen_at = dict.fromkeys(range(launch.local_world_size), began) if all_started else {}
    while not joined.wait(min(_CHECK_S, patience_s / 5)):
        now = time.monotonic()
        present = ranks.present()
        seen_at.update(dict.fromkeys(present, now))
        if now - checked_at > patience_s / 2:  # this process was suspended, and perhaps the whole job
            seen_at = dict.fromkeys(seen_at, now)
            began += now - checked_at
        checked_at = now
        ended = [rank for rank, at in seen_at.items() if now - at > patience_s]
        if ended:
            of_host = "" if launch.local_world_size == launch.world_size else "local "
            reason = (
                f"{of_host}rank {', '.join(map(str, sorted(ended)))} has ended before it joined the job, maybe with "
                "exit code 0: every rank must call unitrain.init() as often as the others, and may exit only after that"
            )
            is_first = launch.local_rank == min(present)
        elif now - began > 1.5 * config.timeout_s:
            reason = (
                f"the ranks have not all joined the job within {now - began:.0f} s (timeout_s is "
                f"{config.timeout_s:g}): check that all {launch.world_size} are running, and can reach one another"
            )
            is_first = launch.rank == 0
        else:
            continue
        if not joined.wait(0 if is_first else _FIRST_S):
            me = f"rank {launch.rank} on {socket.gethostname()} (pid {os.getpid()})"
            end_for_others(f"unitrain: {me}: stopped because {reason}.")
