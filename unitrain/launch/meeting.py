"""The ranks wait for one another in a store: one that rank 0 has just opened, or one that their launcher keeps open."""

from __future__ import annotations

import re
import secrets
import time
from datetime import timedelta

import psutil
from torch.distributed import DistError, PrefixStore, Store

from unitrain.errors import CommunicationError, LaunchError
from unitrain.launch.detect import Launch
from unitrain.process import print_stderr

_REMEDY = (
    "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started, on every host: the ranks then get a new "
    "address after each change of hosts."
)
_COMPLETE = "unitrain/complete"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.25


def meet_in_new_store(store: Store, launch: Launch, timeout: timedelta) -> None:
    """Wait until every rank has connected to the store that rank 0 has opened. Collective.

    Raises:
        CommunicationError: some ranks did not connect; the message names them.
        LaunchError: two processes have come as one rank.
    """
    doubled = "unitrain/doubled"
    if store.add(_count(launch.rank), 1) > 1:
        store.set(doubled, str(launch.rank))
        for key in _keys(launch):  # the others need not wait any longer
            store.set(key, "")
    _connect_and_wait(store, launch, timeout)
    if store.check([doubled]):
        rank = store.get(doubled).decode()
        raise LaunchError(
            f"two processes have come to {launch.address} as rank {rank} of {launch.world_size}: give every process "
            "its own RANK, and every job its own MASTER_PORT."
        )


def meet_in_served_store(store: Store, launch: Launch, timeout: timedelta) -> Store:
    """Return an empty part of the launcher's store, in which every rank has connected. Collective.

    The store outlives the ranks and keeps what earlier ones have set. No variable tells them apart: the torchrun of
    each host counts its own restarts, and none that another host has caused. So rank 0 draws the name of a part and
    announces it. Another rank may find the name that an earlier rank 0 has announced; it looks for a new one until
    the rank 0 that drew the name has seen it.

    Raises:
        CommunicationError: some ranks did not connect; the message names them.
    """
    announcement = f"unitrain/part for {launch.world_size}"
    if launch.rank == 0:
        drawn = secrets.token_hex(8)
        store.set(announcement, drawn)
        own = PrefixStore(drawn, store)
        _connect_and_wait(own, launch, timeout)
        own.set(_COMPLETE, "")
        return own
    deadline = time.monotonic() + timeout.total_seconds()
    part: PrefixStore | None = None
    name, is_first, pause_s = "", False, _FIRST_PAUSE_S
    while time.monotonic() < deadline:
        newest = store.get(announcement).decode() if store.check([announcement]) else ""
        if newest != name:
            part, name = PrefixStore(newest, store), newest
            # Where an earlier process was this rank, all may have met without this one.
            is_first = part.add(_count(launch.rank), 1) == 1
            if is_first:
                part.set(_connected(launch.rank), "")
        elif part is not None and is_first and part.check([_COMPLETE]):
            return part
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
    raise _incomplete(launch, timeout, ["0"] if part is None or not is_first else _missing(part, launch))


def check_torchrun(launch: Launch) -> None:
    """Check the address that torchrun's own store has, where it shares it with the ranks.

    torchrun keeps the first address that it was told (torch 2.15). A host that comes later is told none, and ends after
    60 s; and after rank 0's host was lost, the next one keeps its own, though another host becomes the first.

    Raises:
        LaunchError: this host's ranks were sent to a store of their own host, and rank 0 is on another.
    """
    torchrun = psutil.Process().parent()
    if torchrun is None:
        return
    try:
        command = " ".join(torchrun.cmdline())
        ports = [one.laddr.port for one in torchrun.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    except psutil.Error:  # another user's, or ended
        return
    if launch.node_rank and int(str(launch.address).rpartition(":")[2]) in ports:
        raise LaunchError(
            f"torchrun has sent rank {launch.rank} to {launch.address}, a store that it opened itself when this host "
            f"was the first of the job, but rank 0 is on another host now, and waits elsewhere. {_REMEDY}"
        )
    hosts = re.search(r"--nnodes[= ](\d+):(\d+)", command)
    if launch.rank == 0 and hosts is not None and hosts[1] != hosts[2]:
        print_stderr(
            f"unitrain: torchrun may start this job on {hosts[1]} to {hosts[2]} hosts, but none could join it later. "
            f"{_REMEDY}"
        )


def _count(rank: int) -> str:
    return f"unitrain/count/{rank}"


def _connected(rank: int) -> str:
    return f"unitrain/connected/{rank}"


def _keys(launch: Launch) -> list[str]:
    return [_connected(rank) for rank in range(launch.world_size)]


def _connect_and_wait(store: Store, launch: Launch, timeout: timedelta) -> None:
    store.set(_connected(launch.rank), "")
    try:
        store.wait(_keys(launch), timeout)
    except DistError as error:
        raise _incomplete(launch, timeout, _missing(store, launch)) from error


def _missing(store: Store, launch: Launch) -> list[str]:
    return [str(rank) for rank, key in enumerate(_keys(launch)) if not store.check([key])]


def _incomplete(launch: Launch, timeout: timedelta, missing: list[str]) -> CommunicationError:
    return CommunicationError(
        f"rank {launch.rank} of {launch.world_size} waited {timeout.total_seconds():g} s at {launch.address}, but "
        f"rank {', '.join(missing)} did not connect. Check that all {launch.world_size} processes are running, and "
        "that their hosts can reach that address (firewall, MASTER_ADDR)."
    )
