"""Opens torch's TCPStore, and connects to one without waiting for longer than was asked."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import Future, wait
from datetime import timedelta

from torch.distributed import TCPStore

from unitrain.errors import CommunicationError, LaunchError
from unitrain.launch.detect import Launch
from unitrain.launch.network.open_files import allow_connections

LOOPBACK = "127.0.0.1"
_RETRY_S = 0.1


def open_store(launch: Launch, host: str, port: int, timeout: timedelta) -> TCPStore:
    """Return a new store for the ranks of a job, in the process of rank 0.

    Args:
        launch: how this process was started. The ranks of one host get a store that other hosts can't reach.
        host: an address of this host, for the client in this process.
        port: the port; 0 for a free one.
        timeout: of waits at the store.

    Raises:
        LaunchError: this process may not open a connection for each rank.
        OSError: the port is in use; or DistError.
    """
    allow_connections(launch.world_size)
    if launch.local_world_size == launch.world_size:
        return open_on_loopback(port, timeout)
    # Rank 0 is not to wait in the constructor, which does not say which ranks are missing.
    return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False)


def open_on_loopback(port: int, timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """Return a new store for the processes of this host; other hosts can't reach it.

    torch's own server would listen at all addresses of the host.

    Args:
        port: the port; 0 for a free one.
        timeout: of waits at the store.
    """
    listener = socket.create_server((LOOPBACK, port), backlog=socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def join_store(host: str, port: int, launch: Launch, timeout: timedelta) -> TCPStore:
    """Return a client of the store at an address, waiting until it is open.

    If nothing listens at the address, torch's client waits for up to twice its timeout and prints many lines. If a
    program listens that never answers, it waits forever. So it is started in a thread, once something listens, and is
    given up after ``timeout``.

    Args:
        host: the host of the store.
        port: its port.
        launch: how this process was started, for messages.
        timeout: how long to wait for the store, and for later values in it.

    Raises:
        CommunicationError: nothing listens at the address in time.
        LaunchError: another program listens there.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while not _listens(host, port):
        if time.monotonic() > deadline:
            raise CommunicationError(
                f"rank {launch.rank} of {launch.world_size} waited {timeout.total_seconds():g} s for rank 0 at "
                f"{host}:{port}, but nothing listens there: check that rank 0 runs, the firewall and MASTER_ADDR."
            )
        time.sleep(_RETRY_S)
    joined: Future[TCPStore] = Future()

    def join() -> None:
        try:
            joined.set_result(TCPStore(host, port, launch.world_size, timeout=timeout, wait_for_workers=False))
        except BaseException as error:  # of any kind: otherwise the future would never be done
            joined.set_exception(error)

    # A daemon: a client that waits forever must not keep the process.
    threading.Thread(target=join, daemon=True).start()
    if wait([joined], timeout.total_seconds()).not_done:
        raise LaunchError(
            f"the rendezvous address of {launch.launcher} is {host}:{port}, but another program than rank 0 listens "
            "there. End it (ss -ltnp on that host shows it), or set MASTER_ADDR and MASTER_PORT to another address.",
            on_all_ranks=launch.local_rank > 0,
        )
    return joined.result()


def _listens(host: str, port: int) -> bool:
    """Return whether a connection is accepted at an address."""
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True
