"""How the processes of a job find one another: the store that ``torch.distributed.init_process_group`` is given."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
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

# A store lives as long as its process. MPI can be started once only, and a port that rank 0 gave up and took again
# could be met by a rank that is still on its way out of the first store.
_stores: dict[Launch, Store] = {}
_calls = itertools.count()

_ANSWER_S, _AGAIN_S = 5.0, 0.1
_KEY_VALUE_PATH = "/unitrain/store"


def rendezvous(launch: Launch, timeout_s: float) -> Store:
    """Return a store that the ranks of the job share. Collective: all ranks call it, each as often as the others.

    The n-th call returns the n-th empty part of the job's one store, for a process group made after another ended.

    Args:
        launch: who this process is and how the ranks can meet.
        timeout_s: how long to wait for the other ranks, and how long each later wait at the store may take.

    Raises:
        LaunchError: the address is no host's, or its port is taken.
        BackendError: mpi4py is missing, or talks to another MPI than the one that launched this process.
        CommunicationError: the others did not come in time.
    """
    timeout = timedelta(seconds=timeout_s)
    if launch not in _stores:
        _stores[launch] = _MEETINGS[launch.meeting](launch, timeout)
    store = PrefixStore(f"unitrain/{launch.restarts}/{next(_calls)}", _stores[launch])
    store.set_timeout(timeout)
    return store


def _alone(launch: Launch, timeout: timedelta) -> Store:
    return HashStore()


def _at_address(launch: Launch, timeout: timedelta) -> Store:
    """Meet where the launch says; rank 0 opens the store unless the launcher keeps one open there."""
    address = str(launch.address)
    host, _, port = address.rpartition(":")
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        raise LaunchError(
            f"{launch.launcher} says that the ranks meet at {address}, but this machine knows no host {host!r} "
            f"({error.strerror}). Set MASTER_ADDR and MASTER_PORT to an address of rank 0's host that all can reach."
        ) from error
    opens = launch.rank == 0 and launch.meeting == "tcp"
    try:
        if opens:
            store = TCPStore(
                host, int(port), launch.world_size, is_master=True, timeout=timeout, wait_for_workers=False
            )
        else:
            store = _join(host, int(port), launch, timeout)
        _wait_for_all(store, launch, timeout)
        return store
    except DistError as error:
        if opens and "EADDRINUSE" in str(error):
            raise LaunchError(
                f"port {port} is taken on this host, and {launch.launcher} says that the ranks meet at {address}. "
                "End the program that has it (ss -ltnp shows which), or set MASTER_ADDR and MASTER_PORT to another."
            ) from error
        raise CommunicationError(
            f"rank {launch.rank} of {launch.world_size} waited {timeout.total_seconds():g} s at {address} and did not "
            f"meet all others. Are all {launch.world_size} processes running, and can their hosts reach that address "
            f"(firewall, MASTER_ADDR)? What torch said: {str(error).splitlines()[0]}"
        ) from error


def _join(host: str, port: int, launch: Launch, timeout: timedelta) -> TCPStore:
    """Return a client of the store that comes to be at an address.

    Where nobody listens, torch's own client waits for up to twice its time and then fills the screen; for a word of a
    program that takes connections and says nothing it waits for ever. So it is started once somebody listens.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while not _listens(host, port):
        if time.monotonic() > deadline:
            raise CommunicationError(
                f"rank {launch.rank} of {launch.world_size} waited {timeout.total_seconds():g} s for rank 0 at "
                f"{host}:{port}, and nobody listens there. Was rank 0 started, and does it still run? Can this host "
                "reach that address (firewall, MASTER_ADDR)?"
            )
        time.sleep(_AGAIN_S)
    joined: Future[TCPStore] = Future()

    def join() -> None:
        try:
            joined.set_result(TCPStore(host, port, launch.world_size, timeout=timeout, wait_for_workers=False))
        except BaseException as error:  # whatever it is: who waits for the future would wait for ever
            joined.set_exception(error)

    threading.Thread(target=join, daemon=True).start()
    if wait([joined], _ANSWER_S).not_done and _listens(host, port):
        raise LaunchError(
            f"{launch.launcher} says that the ranks meet at {host}:{port}, but what listens there is not rank 0: "
            "the port is another program's. End that program (ss -ltnp on that host shows it), or set MASTER_ADDR "
            "and MASTER_PORT to another."
        )
    return joined.result()


def _listens(host: str, port: int) -> bool:
    """Whether a connection is taken at an address."""
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True


def _wait_for_all(store: TCPStore, launch: Launch, timeout: timedelta) -> None:
    """Wait until every rank has come, and name those that have not."""
    keys = [f"unitrain/came/{launch.restarts}/{rank}" for rank in range(launch.world_size)]
    store.set(keys[launch.rank], "")
    try:
        store.wait(keys, timeout)
    except DistError as error:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise CommunicationError(
            f"rank {launch.rank} of {launch.world_size} waited {timeout.total_seconds():g} s at {launch.address}, and "
            f"did not meet all others: rank {', '.join(missing)} did not come. Are all {launch.world_size} processes "
            "running, and can their hosts reach that address (firewall, MASTER_ADDR)?"
        ) from error


def _through_mpi(launch: Launch, timeout: timedelta) -> Store:
    with _mpi(launch) as world:
        return _at_port_of_rank_0(launch, timeout, lambda offer: str(world.bcast(offer)))


@contextmanager
def _mpi(launch: Launch) -> Iterator[Any]:
    """Give MPI's communicator of all ranks, and leave MPI as it was found.

    Where nobody else has started MPI it is ended again at once. MPI_Finalize waits for all ranks: at exit, it would
    keep a rank that failed from ending the job. Who wants MPI in the script imports mpi4py.MPI before
    ``unitrain.init``.
    """
    try:
        import mpi4py

        automatic, mpi4py.rc.initialize = mpi4py.rc.initialize, False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendError(
            f"mpirun says that this is one of {launch.world_size} processes, and without Horovod they meet through "
            f"mpi4py, which can't be used ({error}). Install it with pip install 'unitrain[mpi]', or let torchrun "
            "start the job, or set MASTER_ADDR and MASTER_PORT (mpirun -x) to an address of rank 0's host."
        ) from error
    mpi4py.rc.initialize = automatic
    library = MPI.Get_library_version()
    if _family(library) != launch.mpi or MPI.Is_finalized():
        state = "was ended" if MPI.Is_finalized() else f"is {library.split(',')[0].splitlines()[0]!r}"
        raise BackendError(
            f"the MPI of mpi4py {state}, but the processes were started by the mpirun of {launch.mpi} and have to meet "
            "through it. Start them with the mpirun that belongs to mpi4py, or let torchrun start the job, or set "
            "MASTER_ADDR and MASTER_PORT to an address of rank 0's host."
        )
    starts = not MPI.Is_initialized()
    if starts:
        MPI.Init()
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (launch.rank, launch.world_size):
        raise LaunchError(
            f"mpirun says that this is rank {launch.rank} of {launch.world_size}, but MPI sees rank {world.rank} of "
            f"{world.size}: mpi4py was built for another MPI. Reinstall it with pip install --no-binary mpi4py mpi4py."
        )
    yield world
    if starts:
        MPI.Finalize()


def _family(library: str) -> str:
    """Return the name by which ``Launch.mpi`` knows an MPI library, from what MPI_Get_library_version says."""
    if library.startswith("Open MPI v"):
        return "Open MPI 5" if int(library.removeprefix("Open MPI v").split(".")[0]) >= 5 else "Open MPI 4"
    return "MPICH"


def _through_horovodrun(launch: Launch, timeout: timedelta) -> Store:
    """Meet through the key-value server over HTTP that horovodrun keeps for its gloo controller."""
    server = str(launch.address)

    def share(offer: str | None) -> str:
        if offer is not None:
            _request(server, "PUT", offer)
            return offer
        deadline = time.monotonic() + timeout.total_seconds()
        while (answer := _request(server, "GET")) is None:
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"rank 0 did not leave its address with horovodrun ({server}) within "
                    f"{timeout.total_seconds():g} s. Is it running?"
                )
            time.sleep(0.05)
        return answer

    return _at_port_of_rank_0(launch, timeout, share)


def _request(server: str, method: str, body: str | None = None) -> str | None:
    """Put or get the one value that UniTrain keeps with horovodrun; None where there is none yet."""
    connection = http.client.HTTPConnection(server, timeout=10)
    try:
        connection.request(method, _KEY_VALUE_PATH, body)
        response = connection.getresponse()
        text = response.read().decode()
    except OSError as error:
        raise CommunicationError(
            f"horovodrun does not answer at {server}, where HOROVOD_GLOO_RENDEZVOUS_ADDR and "
            f"HOROVOD_GLOO_RENDEZVOUS_PORT say that it is ({error}). Is it still running? Start the job with "
            "horovodrun --gloo -np N python SCRIPT and leave its variables as they are."
        ) from error
    finally:
        connection.close()
    return text if response.status == http.client.OK else None


def _at_port_of_rank_0(launch: Launch, timeout: timedelta, share: Callable[[str | None], str]) -> Store:
    """Meet at a port that was free when rank 0 opened its store there.

    ``share`` is given rank 0's offer, and None elsewhere, and returns the offer on every rank.
    """
    if launch.rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
        hosts = ["127.0.0.1"] if launch.local_world_size == launch.world_size else own_addresses()
        share(json.dumps([hosts, store.port]))
        return store
    hosts, port = json.loads(share(None))
    with reach(hosts, port) as probe:
        host = probe.getpeername()[0]
    return TCPStore(host, port, is_master=False, timeout=timeout)


_MEETINGS: dict[str, Callable[[Launch, timedelta], Store]] = {
    "alone": _alone,
    "tcp": _at_address,
    "served": _at_address,
    "mpi": _through_mpi,
    "horovod": _through_horovodrun,
}
