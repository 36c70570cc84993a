"""The rendezvous: makes the store that ``torch.distributed.init_process_group`` is called with."""

from __future__ import annotations

import errno
import itertools
import json
import secrets
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from torch.distributed import DistError, HashStore, PrefixStore, Store, TCPStore

from unitrain.errors import CommunicationError, LaunchError
from unitrain.launch import mpi
from unitrain.launch.detect import Launch
from unitrain.launch.meeting import meet_in_new_store, meet_in_served_store
from unitrain.launch.network import horovodrun_server
from unitrain.launch.network.addresses import own_addresses, reach
from unitrain.launch.network.tcp_store import LOOPBACK, join_store, open_store

# A store lives as long as its process. MPI can be started only once, and if rank 0 closed a port and opened it again, a
# rank that has not left the first store yet could connect to the second.
_stores: dict[Launch, Store] = {}
_calls = itertools.count()
# Shared through MPI, which can't be started again later.
_secrets: dict[Launch, bytes] = {}

_SECRET_BYTES = 32


def rendezvous(launch: Launch, timeout_s: float) -> Store:
    """Return a store that the ranks of the job share. Collective: all ranks call it the same number of times.

    The n-th call returns the n-th, empty namespace of the job's store, so that a process group can be made after
    another has ended. The timeout also holds for later waits at the store.

    Args:
        launch: how this process was started: says where the ranks meet.
        timeout_s: how long to wait for the other ranks, in seconds.

    Raises:
        LaunchError: the address is wrong, in use, or another job's.
        CommunicationError: not all ranks have come in time, or the store has failed.
        BackendError: the ranks meet through MPI, and mpi4py does not work.
    """
    timeout = timedelta(seconds=timeout_s)
    # A second strategy in this process gets another namespace of the same store.
    if launch not in _stores:
        _stores[launch] = _RENDEZVOUS[launch.rendezvous](launch, timeout)
    store = PrefixStore(f"unitrain/{next(_calls)}", _stores[launch])
    store.set_timeout(timeout)
    return store


def shared_secret(launch: Launch, timeout_s: float) -> bytes | None:
    """Return a secret that the launcher's own means have brought to every rank; None if it has none. Collective.

    MPI's is known to the launcher's processes only. torchrun's store gives its own to everybody who can reach it.

    Args:
        launch: how this process was started. The ranks have met already.
        timeout_s: how long to wait for rank 0, in seconds.
    """
    if launch.launcher != "torchrun":
        return _secrets.get(launch)
    # Torchrun's store outlives the ranks, so the secret is in a new part of it.
    store = rendezvous(launch, timeout_s)
    if launch.rank == 0:
        store.set("secret", secrets.token_hex(_SECRET_BYTES))
    return bytes(store.get("secret"))


def _at_address(launch: Launch, timeout: timedelta) -> Store:
    """Connect to the launch's address, where rank 0 opens the store unless the launcher keeps one open."""
    address = str(launch.address)
    host, _, port = address.rpartition(":")
    try:
        # torch's client would try to resolve a wrong name until its timeout.
        socket.getaddrinfo(host, port)
    except OSError as error:
        raise LaunchError(
            f"the rendezvous address of {launch.launcher} is {address}, but host {host!r} can't be resolved here "
            f"({error.strerror}). Set MASTER_ADDR and MASTER_PORT to an address of rank 0 that all hosts reach.",
            on_all_ranks=launch.local_rank > 0,
        ) from error
    opens = launch.rank == 0 and launch.rendezvous == "tcp"
    try:
        if opens:
            store = open_store(launch, host, int(port), timeout)
        else:
            # Rank 0 has opened a store for the ranks of one host at the loopback address, whatever MASTER_ADDR says.
            on_loopback = launch.rendezvous == "tcp" and launch.local_world_size == launch.world_size
            store = join_store(LOOPBACK if on_loopback else host, int(port), launch, timeout)
        if launch.rendezvous == "served":
            return meet_in_served_store(store, launch, timeout)
        meet_in_new_store(store, launch, timeout)
        return store
    except (DistError, OSError) as error:
        if opens and ("EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE):
            raise LaunchError(
                f"the rendezvous address of {launch.launcher} is {address}, but port {port} is in use on this host, by "
                "another program or a second rank 0. End it (ss -ltnp shows it), give every process its own RANK, or "
                "set MASTER_ADDR and MASTER_PORT to another address."
            ) from error
        raise CommunicationError(
            f"rank {launch.rank} of {launch.world_size}: the rendezvous at {address} failed within "
            f"{timeout.total_seconds():g} s. Check that all {launch.world_size} processes are running, and that their "
            f"hosts can reach that address (firewall, MASTER_ADDR). Error of torch: {str(error).splitlines()[0]}"
        ) from error


def _through_mpi(launch: Launch, timeout: timedelta) -> Store:
    """Let rank 0 broadcast the address of its store through MPI."""
    with mpi.all_ranks(launch) as world:
        # Now or never: MPI is finalised at the end of the block, and can't be started again.
        drawn = secrets.token_bytes(_SECRET_BYTES) if launch.rank == 0 else None
        _secrets[launch] = mpi.broadcast(world, drawn)
        return _at_port_of_rank_0(
            launch, timeout, lambda offer: mpi.broadcast(world, None if offer is None else offer.encode()).decode()
        )


def _through_horovodrun(launch: Launch, timeout: timedelta) -> Store:
    """Let rank 0 leave the address of its store at horovodrun's server."""
    share = partial(horovodrun_server.share, server=str(launch.address), timeout=timeout)
    return _at_port_of_rank_0(launch, timeout, share)


def _at_port_of_rank_0(launch: Launch, timeout: timedelta, share: Callable[[str | None], str]) -> Store:
    """Return a store that rank 0 opens on a free port.

    Args:
        launch: how this process was started.
        timeout: how long to wait for rank 0's store.
        share: is called with rank 0's addresses and port there, with None on other ranks, and returns rank 0's on all.
    """
    if launch.rank == 0:
        store = open_store(launch, LOOPBACK, 0, timeout)
        # All addresses, since rank 0 does not know which of its networks the others are on.
        addresses = [LOOPBACK] if launch.local_world_size == launch.world_size else own_addresses()
        share(json.dumps([addresses, store.port]))
        return store
    hosts, port = _read_offer(share(None), launch)
    # Which of rank 0's addresses this host reaches is found out first: torch's client would wait at the first.
    with reach(hosts, port) as probe:
        host = probe.getpeername()[0]
    return TCPStore(host, port, is_master=False, timeout=timeout)


def _read_offer(offer: str, launch: Launch) -> tuple[list[str], int]:
    """Return rank 0's addresses and port. Anybody who reaches horovodrun's server can have written them."""
    try:
        match json.loads(offer):
            case [[*hosts], int(port)] if all(isinstance(host, str) for host in hosts) and 0 < port < 2**16:
                return hosts, port
    except (ValueError, RecursionError):
        pass
    raise CommunicationError(
        f"rank {launch.rank} of {launch.world_size} can't read the address of rank 0 at {launch.address}: "
        f"{offer[:80]!r}. Another program has written there: keep others off the job's network (SECURITY.md)."
    )


_RENDEZVOUS: dict[str, Callable[[Launch, timedelta], Store]] = {
    "alone": lambda launch, timeout: HashStore(),
    "tcp": _at_address,
    "served": _at_address,
    "mpi": _through_mpi,
    "horovod": _through_horovodrun,
}
