"""The ranks of a job as rank 0 sees them: connections from a few other processes, which have a thread for each rank.

The ranks run the code of a job until they have met, at the store and at the hub. Then they send what ranks send.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import secrets
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed import Store

from unitrain.errors import UnitrainError
from unitrain.job.watch import messages
from unitrain.job.watch.admission import introduce
from unitrain.job.watch.hub import Member, heartbeat_interval_s
from unitrain.job.watch.link import LENGTH
from unitrain.job.watch.messages import Message, decode, encode
from unitrain.launch.detect import Launch
from unitrain.launch.rendezvous import rendezvous
from unitrain.pulse import USER_CODE

HEARTBEAT_TIMEOUT_S = 30.0
TIMEOUT_S = 300.0
_RANKS_OF_A_HOST = 8
_MOST_RANKS_OF_A_PROCESS = 1250
_OTHER_FILES = 512
_STACK_BYTES = 2**18
# Linux: where struct tcp_info has the bytes that were acknowledged, and those that were received.
_TCP_BYTES_AT = 120


def can_have(ranks: int) -> bool:
    """Return whether a process may open a connection for each of so many ranks."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return hard == resource.RLIM_INFINITY or hard >= ranks + _OTHER_FILES


def members(ranks: int) -> list[Member]:
    """Return the processes of a job of so many ranks."""
    return [Member(rank, f"host{rank // _RANKS_OF_A_HOST}", 1000 + rank, 0) for rank in range(ranks)]


def place(rank: int, ranks: int, address: str) -> Launch:
    """Return how a rank was started, which is to meet the others at an address."""
    local, host = rank % _RANKS_OF_A_HOST, rank // _RANKS_OF_A_HOST
    return Launch(
        "env", rank=rank, world_size=ranks, local_rank=local, local_world_size=min(_RANKS_OF_A_HOST, ranks - 1),
        node_rank=host, rendezvous="tcp", address=address,
    )  # fmt: skip


def free_address() -> str:
    """Return an address of this machine that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def connected_bytes() -> tuple[int, int]:
    """Return how many bytes this process has received and sent on the TCP connections that it has open."""
    received = sent = 0
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the one that listed them has been closed
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_BYTES_AT + 16)
                acknowledged, its = struct.unpack_from("QQ", info, _TCP_BYTES_AT)
                sent, received = sent + acknowledged, received + its
    return received, sent


class Members:
    """Ranks of a job, in processes of their own. Each method returns when all have done it.

    Args:
        ranks: the ranks that are simulated.
        world_size: number of ranks of the job.
    """

    def __init__(self, ranks: Sequence[int], world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: list[tuple[BaseProcess, Connection]] = []
        for first in range(0, len(ranks), _MOST_RANKS_OF_A_PROCESS):
            ours, theirs = context.Pipe()
            own = ranks[first : first + _MOST_RANKS_OF_A_PROCESS]
            process = context.Process(target=_serve, args=(theirs, own, world_size), daemon=True)
            process.start()
            theirs.close()
            self._processes.append((process, ours))
        self._wait()

    def begin(self, what: str, *arguments: Any) -> None:
        """Have all begin to do something: a method of ``_Ranks``."""
        for _, connection in self._processes:
            connection.send((what, arguments))

    def end(self) -> list[Any]:
        """Wait until all have done it, and return what each process has found."""
        return self._wait()

    def do(self, what: str, *arguments: Any) -> list[Any]:
        """Do it, and wait until it is done."""
        self.begin(what, *arguments)
        return self._wait()

    def _wait(self) -> list[Any]:
        return [connection.recv() for _, connection in self._processes]

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._processes:
            connection.close()
            process.join(10.0)
            if process.is_alive():
                process.terminate()


@contextmanager
def simulated(ranks: Sequence[int], world_size: int) -> Iterator[Members]:
    """Simulate ranks until the block ends."""
    made = Members(ranks, world_size)
    try:
        yield made
    finally:
        made.close()


def _serve(parent: Connection, ranks: Sequence[int], world_size: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.stack_size(_STACK_BYTES)
    made = _Ranks(ranks, world_size, parent)
    parent.send(None)
    with suppress(EOFError):
        while True:
            what, arguments = parent.recv()
            parent.send(getattr(made, what)(*arguments))


class _Ranks:
    """The ranks of one process."""

    def __init__(self, ranks: Sequence[int], world_size: int, parent: Connection) -> None:
        self._ranks = ranks
        self._world_size = world_size
        self._parent = parent
        self._stores: list[Store] = []
        self._connections: dict[int, socket.socket] = {}
        self._received: dict[int, bytes] = {}

    def meet(self, address: str) -> None:
        """Meet the others at a store."""
        self._stores = self._in_threads(lambda rank: rendezvous(place(rank, self._world_size, address), TIMEOUT_S))

    def introduce(self, port: int, key: bytes) -> None:
        """Connect to the hub, and wait until all have."""
        made = self._in_threads(lambda rank: introduce(["127.0.0.1"], port, key, rank, TIMEOUT_S))
        self._connections = dict(zip(self._ranks, made, strict=True))
        self._received = dict.fromkeys(self._ranks, b"")
        waiting = set(self._ranks)
        for rank, message in self._messages(waiting):
            if isinstance(message, messages.HubHeartbeat):
                waiting.discard(rank)

    def watch(self, seconds: float) -> None:
        """Send heartbeats, evenly over the time."""
        heartbeat = _framed(messages.Heartbeat(USER_CODE, 1000, 0.1))
        interval_s = heartbeat_interval_s(HEARTBEAT_TIMEOUT_S, self._world_size)
        begin, sent = time.perf_counter(), 0
        with self._selector() as selector:
            while (passed := time.perf_counter() - begin) < seconds:
                due = int(passed / interval_s * len(self._ranks))
                for number in range(sent, due):
                    self._connections[self._ranks[number % len(self._ranks)]].sendall(heartbeat)
                sent = due
                for key, _ in selector.select(0.001):
                    self._connections[key.data].recv(2**16)

    def die(self, rank: int) -> float:
        """End the connection of a rank, if it is one of these, and return when."""
        if rank in self._connections:
            self._connections.pop(rank).close()
            self._ranks = [other for other in self._ranks if other != rank]
        return time.monotonic()

    def survive(self, step: int) -> float:
        """Do what survivors do at a verdict, and return when the last was told.

        Each reports that a collective has failed.
        """
        left = set(self._ranks)
        told = 0.0
        for rank, message in self._messages(left):
            if isinstance(message, messages.Verdict):
                told = time.monotonic()
                heartbeat = messages.Heartbeat("all_reduce", step, 0.1)
                failed = messages.Failed("another rank has ended: " + "connection reset by peer " * 8, True)
                self._send(rank, heartbeat, messages.Ask(), failed)
                left.discard(rank)
        return told

    def leave(self) -> None:
        """Leave the job."""
        for rank in self._ranks:
            self._send(rank, messages.Leave())
        left = set(self._ranks)
        for rank, message in self._messages(left):
            if isinstance(message, messages.Leave):
                left.discard(rank)

    def hang_up(self) -> None:
        """End all connections to the hub."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _send(self, rank: int, *several: Message) -> None:
        self._connections[rank].sendall(b"".join(map(_framed, several)))

    def _in_threads(self, action: Callable[[int], Any]) -> list[Any]:
        """Call a function for each rank, all at the same time."""
        found: dict[int, Any] = {}

        def run(rank: int) -> None:
            try:
                found[rank] = action(rank)
            except UnitrainError as error:
                found[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in self._ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [one for one in found.values() if isinstance(one, UnitrainError)]
        if errors:
            raise RuntimeError(f"{len(errors)} of {len(self._ranks)} ranks failed: {errors[0]}")
        return [found[rank] for rank in self._ranks]

    @contextmanager
    def _selector(self) -> Iterator[selectors.BaseSelector]:
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            yield selector

    def _messages(self, waiting: set[int]) -> Iterator[tuple[int, Message]]:
        """Yield what the hub sends to each rank, until no rank is waiting any more."""
        with self._selector() as selector:
            while waiting:
                for key, _ in selector.select(TIMEOUT_S):
                    rank: int = key.data
                    data = self._connections[rank].recv(2**16)
                    if not data:
                        if rank in waiting:
                            raise RuntimeError(f"the hub has closed the connection of rank {rank}")
                        selector.unregister(key.fileobj)  # it ends when all have left
                    yield from ((rank, message) for message in self._decoded(rank, data))

    def _decoded(self, rank: int, data: bytes) -> Iterator[Message]:
        data = self._received[rank] + data
        while len(data) >= LENGTH.size:
            [length] = LENGTH.unpack_from(data)
            if len(data) < LENGTH.size + length:
                break
            message = decode(data[LENGTH.size : LENGTH.size + length])
            assert message is not None
            yield message
            data = data[LENGTH.size + length :]
        self._received[rank] = data


def _framed(message: Message) -> bytes:
    content = encode(message)
    return LENGTH.pack(len(content)) + content


def new_key() -> bytes:
    """Return the key of a job."""
    return secrets.token_bytes(32)
