"""The rendezvous: makes the store that ``torch.distributed.init_process_group`` is called with."""

from __future__ import annotations

import ctypes
import errno
import http.client
import itertools
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, HashStore, PrefixStore, Store, TCPStore

from unitrain.errors import BackendError, CommunicationError, LaunchError
from unitrain.launch.addresses import own_addresses, reach
from unitrain.launch.detect import Launch
from unitrain.launch.installed_mpi import point_to_installed_mpi
from unitrain.launch.meeting import check_torchrun, meet_in_new_store, meet_in_served_store
from unitrain.launch.open_files import allow_connections

# A store lives as long as its process. MPI can be started only once, and if rank 0 closed a port and opened it again, a
# rank that has not left the first store yet could connect to the second.
_stores: dict[Launch, Store] = {}
_calls = itertools.count()
# Shared through MPI, which can't be started again later.
_secrets: dict[Launch, bytes] = {}

_ANSWER_S, _RETRY_S = 5.0, 0.1
_KEY_VALUE_PATH = "/unitrain/store"
_HERE = "/unitrain/rank-{}"
_MOST_BYTES = 2**16  # of rank 0's addresses
_SECRET_BYTES = 32
_LOOPBACK = "127.0.0.1"
# As torch's client begins: a number that identifies the protocol, then a ping, whose number the store sends back.
_PINGED = struct.pack("=I", 4711)
_PING = struct.pack("=BIB", 0, 0x3C85F7CE, 13) + _PINGED


def rendezvous(launch: Launch, timeout_s: float) -> Store:
    """Return a store that the ranks of the job share. Collective: all ranks call it the same number of times.

    The n-th call returns the n-th, empty namespace of the job's store, so that a process group can be made after
    another has ended.

    Args:
        launch: the place of this process, and how the ranks find one another.
        timeout_s: timeout for the other ranks, and for later waits at the store.

    Raises:
        LaunchError: the host of the address is unknown, or its port is in use.
        BackendError: mpi4py is missing, or belongs to another MPI than the launcher.
        CommunicationError: the other ranks did not connect in time.
    """
    timeout = timedelta(seconds=timeout_s)
    if launch not in _stores:
        _stores[launch] = _RENDEZVOUS[launch.rendezvous](launch, timeout)
    store = PrefixStore(f"unitrain/{next(_calls)}", _stores[launch])
    store.set_timeout(timeout)
    return store


def shared_secret(launch: Launch, timeout_s: float) -> bytes | None:
    """Return a secret that the launcher's own means have brought to every rank; None if it has none. Collective.

    MPI's is known to the launcher's processes only. torchrun's store gives its own to everybody who can reach it.

    Args:
        launch: the place of this process.
        timeout_s: timeout for the other ranks.
    """
    if launch.launcher != "torchrun":
        return _secrets.get(launch)
    store = rendezvous(launch, timeout_s)
    if launch.rank == 0:
        store.set("secret", secrets.token_hex(_SECRET_BYTES))
    return bytes(store.get("secret"))


def open_on_loopback(port: int, timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """Return a new store for the processes of this host; other hosts can't reach it.

    Args:
        port: its port; 0 for a free one.
        timeout: of waits at the store.

    Raises:
        OSError: the port is in use.
    """
    listener = socket.create_server((_LOOPBACK, port), backlog=socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return TCPStore(
        _LOOPBACK, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _alone(launch: Launch, timeout: timedelta) -> Store:
    return HashStore()


def _at_address(launch: Launch, timeout: timedelta) -> Store:
    """Connect to the launch's address, where rank 0 opens the store unless the launcher keeps one open."""
    if launch.address is None:
        raise LaunchError(
            "with srun --distribution=arbitrary, SLURM does not say on which host rank 0 is. Set MASTER_ADDR to that "
            "host, the first line of SLURM_HOSTFILE, and MASTER_PORT to a port that is free there, or leave out the "
            "option."
        )
    address = launch.address
    host, _, port = address.rpartition(":")
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        raise LaunchError(
            f"the rendezvous address of {launch.launcher} is {address}, but host {host!r} can't be resolved here "
            f"({error.strerror}). Set MASTER_ADDR and MASTER_PORT to an address of rank 0's host that all hosts can "
            "reach.",
            on_all_ranks=launch.local_rank > 0,
        ) from error
    if launch.rendezvous == "served":
        check_torchrun(launch)
    opens = launch.rank == 0 and launch.rendezvous == "tcp"
    on_loopback = launch.rendezvous == "tcp" and launch.local_world_size == launch.world_size
    if opens:
        allow_connections(launch.world_size)
    try:
        if opens and on_loopback:
            store = open_on_loopback(int(port), timeout)
        elif opens:
            store = TCPStore(
                host, int(port), launch.world_size, is_master=True, timeout=timeout, wait_for_workers=False
            )
        else:
            store = _join(_LOOPBACK if on_loopback else host, int(port), launch, timeout)
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


def _join(host: str, port: int, launch: Launch, timeout: timedelta) -> TCPStore:
    """Return a client of the store at an address, waiting until it is open.

    If nothing listens at the address, torch's client waits for up to twice its timeout and prints many lines. If a
    program listens that never answers, it waits forever. So it is started in a thread, once something listens.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while not _listens(host, port):
        if time.monotonic() > deadline:
            raise CommunicationError(
                f"rank {launch.rank} of {launch.world_size} waited {timeout.total_seconds():g} s for rank 0 at "
                f"{host}:{port}, but nothing listens there. Check that rank 0 is running, and that this host can reach "
                "that address (firewall, MASTER_ADDR)."
            )
        time.sleep(_RETRY_S)
    joined: Future[TCPStore] = Future()

    def join() -> None:
        try:
            joined.set_result(TCPStore(host, port, launch.world_size, timeout=timeout, wait_for_workers=False))
        except BaseException as error:  # of any kind: otherwise the future would never be done
            joined.set_exception(error)

    threading.Thread(target=join, daemon=True).start()
    if wait([joined], _ANSWER_S).not_done and _listens(host, port) and not _is_store(host, port):
        raise LaunchError(
            f"the rendezvous address of {launch.launcher} is {host}:{port}, but another program than rank 0 listens "
            "there. End that program (ss -ltnp on that host shows it), or set MASTER_ADDR and MASTER_PORT to another "
            "address.",
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


def _is_store(host: str, port: int) -> bool:
    """Return whether a store of torch listens at an address.

    Its client may need longer than this, since it looks up the names of both ends. Where the name server does not
    know them, or is asked by thousands of ranks at once, that takes seconds.
    """
    try:
        with socket.create_connection((host, port), 1.0) as connection:
            connection.sendall(_PING)
            return connection.recv(len(_PINGED)) == _PINGED
    except OSError:
        return False


def _through_mpi(launch: Launch, timeout: timedelta) -> Store:
    with _mpi(launch) as world:
        drawn = secrets.token_bytes(_SECRET_BYTES) if launch.rank == 0 else None
        _secrets[launch] = _mpi_broadcast(world, drawn)
        return _at_port_of_rank_0(
            launch,
            timeout,
            lambda offer: _mpi_broadcast(world, None if offer is None else offer.encode()).decode(),
        )


def _mpi_broadcast(world: Any, data: bytes | None) -> bytes:
    """Return rank 0's bytes. MPI's own broadcast of objects pickles them."""
    length = bytearray((len(data or b"")).to_bytes(8, "big"))
    world.Bcast(length)
    buffer = bytearray(data) if data is not None else bytearray(int.from_bytes(length, "big"))
    world.Bcast(buffer)
    return bytes(buffer)


@contextmanager
def _mpi(launch: Launch) -> Iterator[Any]:
    """Yield MPI's communicator of all ranks, and leave MPI as it was.

    If MPI is not initialised yet, it is finalised again at once. MPI_Finalize waits for all ranks: at exit, it would
    keep a failed rank from ending the job. A script that uses MPI imports mpi4py.MPI before ``unitrain.init``.
    """
    point_to_installed_mpi()
    try:
        import mpi4py

        automatic, mpi4py.rc.initialize = mpi4py.rc.initialize, False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendError(
            f"mpirun started {launch.world_size} processes, whose rendezvous without Horovod needs mpi4py, which can't "
            f"be imported ({error}). Install it with pip install 'unitrain[mpi]', or start the job with torchrun, or "
            "set MASTER_ADDR and MASTER_PORT (mpirun -x) to an address of rank 0's host."
        ) from error
    mpi4py.rc.initialize = automatic
    library = MPI.Get_library_version()
    if mpi_family(library) != launch.mpi or MPI.Is_finalized():
        state = "was finalized" if MPI.Is_finalized() else f"is {library.split(',')[0].splitlines()[0]!r}"
        raise BackendError(
            f"the MPI of mpi4py {state}, but the processes were started by the mpirun of {launch.mpi} and need it for "
            "the rendezvous. Start them with the mpirun that belongs to mpi4py, or start the job with torchrun, or set "
            "MASTER_ADDR and MASTER_PORT to an address of rank 0's host."
        )
    starts = not MPI.Is_initialized()
    if starts:
        ctypes.CDLL(MPI.__file__).MPI_Init(None, None)  # MPI.Init would hold the GIL until all ranks have come
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (launch.rank, launch.world_size):
        raise LaunchError(
            f"according to mpirun this process is rank {launch.rank} of {launch.world_size}, but according to mpi4py "
            f"rank {world.rank} of {world.size}: mpi4py was built for another MPI. Rebuild it with pip install "
            "--force-reinstall --no-cache-dir --no-binary mpi4py mpi4py."
        )
    yield world
    if starts:
        MPI.Finalize()


def mpi_family(library: str) -> str:
    """Return the value of ``Launch.mpi`` for an MPI library, given the result of MPI_Get_library_version."""
    if library.startswith("Open MPI v"):
        return "Open MPI 5" if int(library.removeprefix("Open MPI v").split(".")[0]) >= 5 else "Open MPI 4"
    return "MPICH"


def _through_horovodrun(launch: Launch, timeout: timedelta) -> Store:
    """Exchange rank 0's address through horovodrun's key-value server over HTTP."""
    server = str(launch.address)

    def share(offer: str | None) -> str:
        if offer is not None:
            _request(server, "PUT", offer)
            return offer
        deadline = time.monotonic() + timeout.total_seconds()
        while (answer := _request(server, "GET")) is None:
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"rank 0 did not send its address to horovodrun's server ({server}) within "
                    f"{timeout.total_seconds():g} s. Check that rank 0 is running."
                )
            time.sleep(0.05)
        return answer

    return _at_port_of_rank_0(launch, timeout, share)


def await_all(launch: Launch, server: str, timeout_s: float) -> None:
    """Wait at the server of horovodrun's elastic driver until every rank has come there. Collective.

    Horovod's own rendezvous would abort the process if one never came: that of a host that was added, say, and on which
    no process could be started.

    Args:
        launch: the place of this process.
        server: address of the server.
        timeout_s: timeout for the other ranks.

    Raises:
        CommunicationError: a rank did not come in time, or the server does not answer.
    """
    deadline = time.monotonic() + timeout_s
    # Only rank 0 asks for each of them.
    awaited = set(range(1, launch.world_size)) if launch.rank == 0 else {0}
    if launch.rank:
        _request(server, "PUT", "here", path=_HERE.format(launch.rank))
    while awaited := {rank for rank in awaited if _request(server, "GET", path=_HERE.format(rank)) is None}:
        if time.monotonic() > deadline:
            ranks = ", ".join(map(str, sorted(awaited)))
            raise CommunicationError(
                f"rank {launch.rank} of {launch.world_size} waited {timeout_s:g} s for rank {ranks} to be started. "
                "See above for what horovodrun says of its host."
            )
        time.sleep(_RETRY_S)
    if launch.rank == 0:
        _request(server, "PUT", "here", path=_HERE.format(0))


def _request(server: str, method: str, body: str | None = None, path: str = _KEY_VALUE_PATH) -> str | None:
    """Put or get a value of UniTrain's at horovodrun's server; return None if it is not set yet."""
    connection = http.client.HTTPConnection(server, timeout=10)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        content = response.read(_MOST_BYTES).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise CommunicationError(
            f"horovodrun does not answer at {server}, the address in HOROVOD_GLOO_RENDEZVOUS_ADDR and "
            f"HOROVOD_GLOO_RENDEZVOUS_PORT ({error}). Check that it is still running. Start the job with "
            "horovodrun --gloo -np N python SCRIPT and leave its variables as they are."
        ) from error
    finally:
        connection.close()
    return content if response.status == http.client.OK else None


def _at_port_of_rank_0(launch: Launch, timeout: timedelta, share: Callable[[str | None], str]) -> Store:
    """Return a store that rank 0 opens on a free port.

    Args:
        launch: the place of this process.
        timeout: timeout for the other ranks.
        share: called with rank 0's addresses and port on rank 0, and with None elsewhere; returns rank 0's everywhere.
    """
    one_host = launch.local_world_size == launch.world_size
    if launch.rank == 0:
        allow_connections(launch.world_size)
        if one_host:
            store = open_on_loopback(0, timeout)
        else:
            store = TCPStore(_LOOPBACK, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        share(json.dumps([[_LOOPBACK] if one_host else own_addresses(), store.port]))
        return store
    hosts, port = _read_offer(share(None), launch)
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
        f"{offer[:80]!r}. Another program has written there: start the job in a network that only its hosts can "
        "reach (SECURITY.md)."
    )


_RENDEZVOUS: dict[str, Callable[[Launch, timedelta], Store]] = {
    "alone": _alone,
    "tcp": _at_address,
    "served": _at_address,
    "mpi": _through_mpi,
    "horovod": _through_horovodrun,
}
