"""The thread on rank 0 that runs the hub: moves messages between the hub and its connections, with asyncio."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from unitrain.job.watch import messages
from unitrain.job.watch.admission import admit_ranks
from unitrain.job.watch.hub import Hub, Member, heartbeat_interval_s
from unitrain.job.watch.link import LENGTH, MOST_BYTES, close_in_children
from unitrain.job.watch.messages import Message, decode, encode
from unitrain.launch.network.open_files import allow_connections

Observer = Callable[[int, messages.Heartbeat, float], None]
"""Called with the number of a rank, its heartbeat, and the time."""
_CHECKS_PER_HEARTBEAT = 4


def listen(one_host: bool, backlog: int) -> socket.socket:
    """Return a listener at a free port: of this host only, or of all its addresses.

    Args:
        one_host: whether all ranks are on this host, so that no other host needs to connect.
        backlog: how many connections may wait to be accepted: one from each rank.
    """
    if one_host:
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


class HubServer(threading.Thread):
    """Runs the hub. The thread ends when all ranks have left, or if not all have connected in time.

    Args:
        members: all processes, by rank.
        key: the job's key. A rank must have it to be admitted.
        timeout_s: seconds that a rank may take to connect, and that it may wait for other ranks.
        heartbeat_timeout_s: seconds without a heartbeat after which a rank counts as stalled.
        one_host: whether connections from other hosts are impossible.

    Attributes:
        port: the port that the hub listens at.
        observers: called with each heartbeat, in this thread; none by default.
    """

    def __init__(
        self, members: Sequence[Member], key: bytes, *, timeout_s: float, heartbeat_timeout_s: float, one_host: bool
    ) -> None:
        super().__init__(name="unitrain hub", daemon=True)
        allow_connections(len(members))
        self._listener = listen(one_host, len(members))
        close_in_children(self._listener)
        self.port: int = self._listener.getsockname()[1]
        self._admit = partial(admit_ranks, self._listener, key, len(members), timeout_s)
        self._interval_s = heartbeat_interval_s(heartbeat_timeout_s, len(members))
        self.observers: list[Observer] = []
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._make_hub = partial(
            Hub, members, timeout_s=timeout_s, heartbeat_timeout_s=heartbeat_timeout_s, send=self._send
        )

    def run(self) -> None:
        """Connect to all ranks, and run the hub until all have left."""
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        """Admit all ranks, and serve them until all have left."""
        admitted = await self._admit()
        if not admitted:
            return
        readers = {}
        # To this process last: a verdict ends it, and the others would not receive theirs.
        for rank in sorted(admitted, reverse=True):
            readers[rank], self._writers[rank] = await asyncio.open_connection(sock=admitted[rank])
        hub = self._make_hub(now=time.monotonic())
        running = {asyncio.create_task(self._read(rank, reader, hub)) for rank, reader in readers.items()}
        running.add(asyncio.create_task(self._check(hub)))
        while not hub.finished:
            ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            # A bug in the hub must end this thread, so that the ranks notice, and not only a task of it.
            for task in ended:
                task.result()
        self._send(None, messages.Leave())
        for rank in list(self._writers):
            self._hang_up(rank)

    async def _check(self, hub: Hub) -> None:
        """Have the hub check its ranks, and send them heartbeats. Until cancelled."""
        while True:
            self._send(None, messages.HubHeartbeat())
            for _ in range(_CHECKS_PER_HEARTBEAT):
                # More often than heartbeats are sent, so that a stall is noticed soon after its timeout.
                hub.check(time.monotonic())
                await asyncio.sleep(self._interval_s / _CHECKS_PER_HEARTBEAT)

    async def _read(self, rank: int, reader: asyncio.StreamReader, hub: Hub) -> None:
        """Pass a rank's messages on until the connection ends, a message is invalid, or all ranks have left."""
        while (message := await _next(reader)) is not None:
            now = time.monotonic()
            hub.receive(rank, message, now)
            if self.observers and isinstance(message, messages.Heartbeat):
                for observe in self.observers:
                    observe(rank, message, now)
            if hub.finished:
                return
        # Before the verdict, which would be kept for a rank that does not read.
        self._hang_up(rank)
        hub.disconnected(rank)

    def _hang_up(self, rank: int) -> None:
        """Close the connection of a rank, and drop the messages that it has not read."""
        writer = self._writers.pop(rank)
        writer.transport.abort()  # closing it would wait for a rank that has stopped reading

    def _send(self, rank: int | None, message: Message) -> None:
        """Send a message to a rank, or to all (None). It is buffered while a rank does not read."""
        content = encode(message)
        data = LENGTH.pack(len(content)) + content
        for writer in self._writers.values() if rank is None else [self._writers.get(rank)]:
            # A rank that has stopped reading gets no heartbeats, which would pile up.
            if writer and not (isinstance(message, messages.HubHeartbeat) and writer.transport.get_write_buffer_size()):
                writer.write(data)


async def _next(reader: asyncio.StreamReader) -> Message | None:
    """Return the next message, or None if the connection has ended, or the message is invalid."""
    try:
        [length] = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return decode(await reader.readexactly(length)) if 0 <= length <= MOST_BYTES else None
    except (OSError, asyncio.IncompleteReadError):
        return None
