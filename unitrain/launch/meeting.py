"""The ranks wait for one another in a store: one that rank 0 has just opened, or one that their launcher keeps open."""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store

from unitrain.errors import CommunicationError, LaunchError, listed
from unitrain.launch.detect import Launch

_GO_ON, _DOUBLED, _COMPLETE = "unitrain/go on", "unitrain/doubled", "unitrain/complete"
_STEP = "unitrain/step"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.25
_CALM = 1000  # ranks: that many may ask a store that often; more ask more rarely
_ANSWER_S, _LAST_READ_S = 5.0, 1.0


def meet_in_new_store(store: Store, launch: Launch, timeout: timedelta) -> None:
    """Wait until every rank has connected to the store that rank 0 has opened. Collective.

    The last of them lets all continue: what the store does for a rank does not depend on their number.

    Args:
        store: this rank's client of the store.
        launch: how this process was started.
        timeout: how long to wait for the others.

    Raises:
        LaunchError: two processes have come as one rank, or a rank of another job has come.
        CommunicationError: not all ranks have come in time.
    """
    if launch.step is not None:
        _check_step(store, launch, timeout)
    # Two processes with one rank would otherwise meet without the rank that is missing.
    if not _arrive(store, launch):
        others_read = not store.check([_GO_ON])
        store.set(_DOUBLED, str(launch.rank))
        store.set(_GO_ON, "")  # the others need not wait any longer
        raise _doubled(launch.rank, launch, on_all_ranks=others_read)
    try:
        store.wait([_GO_ON], timeout)
    except DistError as error:
        missing = _missing(store, launch)
        _let_others_read(launch)
        raise _incomplete(launch, timeout, missing) from error
    if store.check([_DOUBLED]):
        rank = int(store.get(_DOUBLED))
        _let_others_read(launch)
        raise _doubled(rank, launch, on_all_ranks=True)


def meet_in_served_store(store: Store, launch: Launch, timeout: timedelta) -> Store:
    """Return an empty part of the launcher's store once every rank has connected to it. Collective.

    The store outlives the ranks and keeps what earlier ones have set. No variable tells them apart: the torchrun of
    each host counts its own restarts only. So rank 0 draws the name of a part and announces it. Another rank may find
    the name of an earlier rank 0; it looks for a new one until the rank 0 that drew the name has seen it.

    Args:
        store: this rank's client of the store.
        launch: how this process was started.
        timeout: how long to wait for the others.

    Raises:
        CommunicationError: not all ranks have come in time.
    """
    announcement = f"unitrain/part for {launch.world_size}"
    part: PrefixStore | None = None
    if launch.rank == 0:
        drawn = secrets.token_hex(8)
        # An earlier run in the same store may have left another name there. It is replaced.
        store.set(announcement, drawn)
        part = PrefixStore(drawn, store)
        _arrive(part, launch)
        try:
            part.wait([_GO_ON], timeout)
        except DistError as error:
            raise _incomplete(launch, timeout, _missing(part, launch)) from error
        # Tells the others that this part is not an earlier rank 0's, which would have all arrivals, too.
        part.set(_COMPLETE, "")
        return part
    deadline = time.monotonic() + timeout.total_seconds()
    name, is_first, pause_s = "", False, _FIRST_PAUSE_S
    while time.monotonic() < deadline:
        newest = store.get(announcement).decode() if store.check([announcement]) else ""
        if newest != name:
            part, name = PrefixStore(newest, store), newest
            # Where an earlier process was this rank, all may have met without this one.
            is_first = _arrive(part, launch)
        elif part is not None and is_first and part.check([_COMPLETE]):
            return part
        time.sleep(pause_s)
        # More and more rarely: the store, which rank 0 may share with thousands, answers one request at a time.
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S * max(1, launch.world_size / _CALM))
    raise _incomplete(launch, timeout, "rank 0" if part is None or not is_first else _missing(part, launch))


def _check_step(store: Store, launch: Launch, timeout: timedelta) -> None:
    """Check that the store belongs to this rank's step, before this rank is counted for another step."""
    if launch.rank == 0:
        store.set(_STEP, str(launch.step))
        return
    try:
        store.wait([_STEP], timeout)
    except DistError as error:
        raise _incomplete(launch, timeout, "rank 0") from error
    other = store.get(_STEP).decode()
    if other != launch.step:
        raise LaunchError(
            f"rank {launch.rank} of {launch.launcher}'s job {launch.step} has come to {launch.address}, where the "
            f"ranks of job {other} meet. Unset MASTER_ADDR and MASTER_PORT, or give each job another MASTER_PORT.",
            on_all_ranks=launch.local_rank > 0,
        )


def _arrive(store: Store, launch: Launch) -> bool:
    """Record that this rank has connected, and return whether it is the first process to come as this rank."""
    if store.add(_arrival(launch.rank), 1) > 1:
        return False
    # One atomic counter, so that no rank has to ask for the keys of all others.
    if store.add("unitrain/count", 1) >= launch.world_size:
        store.set(_GO_ON, "")
    return True


def _arrival(rank: int) -> str:
    """Return the key that counts the processes which have come as a rank."""
    return f"unitrain/connected/{rank}"


def _let_others_read(launch: Launch) -> None:
    """Keep the store open for a second before an error ends rank 0: the other ranks still read the reason there."""
    if launch.rank == 0:
        time.sleep(_LAST_READ_S)


def _missing(store: Store, launch: Launch) -> str:
    """Return which ranks have not connected. The first rank that asks looks for them, and tells the others."""
    # Thousands of ranks that each asked for the keys of thousands would keep the store busy for minutes.
    if store.add("unitrain/asked", 1) == 1:
        missing = [rank for rank in range(launch.world_size) if not store.check([_arrival(rank)])]
        store.set("unitrain/missing", f"rank {listed(missing)}")
    try:
        store.wait(["unitrain/missing"], timedelta(seconds=_ANSWER_S))
    except DistError:
        return "some ranks"
    return store.get("unitrain/missing").decode()


def _doubled(rank: int, launch: Launch, *, on_all_ranks: bool) -> LaunchError:
    """Return the error that two processes have the same rank."""
    return LaunchError(
        f"two processes have come to {launch.address} as rank {rank} of {launch.world_size}: give every process its "
        "own RANK, and every job its own MASTER_PORT.",
        on_all_ranks=on_all_ranks,
    )


def _incomplete(launch: Launch, timeout: timedelta, missing: str) -> CommunicationError:
    """Return the error that some ranks have not come in time. ``missing`` names them."""
    return CommunicationError(
        f"rank {launch.rank} of {launch.world_size} waited {timeout.total_seconds():g} s at {launch.address}, but "
        f"{missing} did not connect. Check that all {launch.world_size} processes are running, and that their hosts "
        "can reach that address (firewall, MASTER_ADDR)."
    )
