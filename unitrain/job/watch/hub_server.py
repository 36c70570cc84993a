"""The thread on rank 0 that runs the hub: moves messages between the hub and its connections.

One selector watches all connections, so that the work depends on what has arrived and not on the number of ranks.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial

from unitrain.job.watch import messages
from unitrain.job.watch.admission import admit_ranks
from unitrain.job.watch.hub import Hub, Member, heartbeat_interval_s
from unitrain.job.watch.link import LENGTH, MOST_BYTES, close_in_children
from unitrain.job.watch.messages import Message, decode, encode
from unitrain.launch.network.open_files import allow_connections

_READ_BYTES = 2**16
_CHECKS_PER_HEARTBEAT = 4
# A larger job is looked after so many times a second, and not for each message: to wake up costs more than a message.
_SMALL_JOB = 125
_PAUSE_S = 0.05


def _listen(one_host: bool, backlog: int) -> socket.socket:
    if one_host:
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


class _Connection:
    """The hub's end of the connection to a rank. Never blocks."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank = rank
        self.socket = connection
        self.unsent = bytearray()
        self._received = b""

    def send(self, data: bytes) -> None:
        """Send bytes; what the rank does not take now is kept in ``unsent``."""
        self.unsent += data
        try:
            sent = self.socket.send(self.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = len(self.unsent)  # the rank has gone; reading notices it too
        del self.unsent[:sent]

    def receive(self) -> list[Message] | None:
        """Return the messages that have arrived; None if the connection has ended, or a message is invalid."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        data, at = self._received + data, 0
        received: list[Message] = []
        while len(data) - at >= LENGTH.size:
            [length] = LENGTH.unpack_from(data, at)
            if not 0 <= length <= MOST_BYTES:
                return None
            end = at + LENGTH.size + length
            if len(data) < end:
                break
            message = decode(data[at + LENGTH.size : end])
            if message is None:
                return None
            received.append(message)
            at = end
        self._received = data[at:]
        return received


class HubServer(threading.Thread):
    """Runs the hub. The thread ends when all ranks have left, or if not all have connected in time.

    Args:
        members: all processes of the job, by rank.
        key: the job's key, which a rank must have to be admitted.
        timeout_s: seconds within which all ranks must connect, and that a rank may wait for others.
        heartbeat_timeout_s: seconds without a heartbeat after which a rank counts as stalled.
        one_host: whether all ranks are on this host.
        election_s: seconds that ranks have to report their states after the verdict.

    Raises:
        LaunchError: this process may not open a connection to every rank.
    """

    def __init__(
        self,
        members: Sequence[Member],
        key: bytes,
        *,
        timeout_s: float,
        heartbeat_timeout_s: float,
        one_host: bool,
        election_s: float = 10.0,
    ) -> None:
        super().__init__(name="unitrain hub", daemon=True)
        allow_connections(len(members))
        self._listener = _listen(one_host, len(members))
        close_in_children(self._listener)
        self.port: int = self._listener.getsockname()[1]
        self._admit = partial(admit_ranks, self._listener, key, len(members), timeout_s)
        self._interval_s = heartbeat_interval_s(heartbeat_timeout_s, len(members))
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        self._make_hub = partial(
            Hub, members, send=self._send,
            timeout_s=timeout_s, heartbeat_timeout_s=heartbeat_timeout_s, election_s=election_s,
        )  # fmt: skip

    def run(self) -> None:
        """Connect to all ranks, and run the hub until all have left."""
        admitted = self._admit() or {}
        try:
            # To this process last: a verdict ends it, and the others would not receive theirs.
            for rank in sorted(admitted, reverse=True):
                connection = self._connections[rank] = _Connection(rank, admitted[rank])
                self._selector.register(connection.socket, selectors.EVENT_READ, connection)
            if admitted:
                self._serve(self._make_hub(now=time.monotonic()))
                self._send(None, messages.Leave())
        finally:
            for connection in self._connections.values():
                connection.socket.close()
            self._selector.close()

    def _serve(self, hub: Hub) -> None:
        next_beat = next_check = time.monotonic()
        while not hub.finished and self._connections:
            ready = self._selector.select(max(0.0, next_check - time.monotonic()))
            now = time.monotonic()
            if len(self._connections) > _SMALL_JOB:
                time.sleep(_PAUSE_S)
                ready = self._selector.select(0.0)
            for entry, events in ready:
                if events & selectors.EVENT_WRITE:
                    self._write(entry.data, b"")
                if events & selectors.EVENT_READ:
                    self._read(entry.data, hub, now)
            if now >= next_check:
                next_check = now + self._interval_s / _CHECKS_PER_HEARTBEAT
                hub.check(now)
            if now >= next_beat:
                next_beat = now + self._interval_s
                self._send(None, messages.HubHeartbeat())

    def _read(self, connection: _Connection, hub: Hub, now: float) -> None:
        received = connection.receive()
        for message in received or ():
            hub.receive(connection.rank, message, now)
        if received is None:
            self._selector.unregister(connection.socket)
            connection.socket.close()
            del self._connections[connection.rank]
            hub.disconnected(connection.rank)

    def _send(self, rank: int | None, message: Message) -> None:
        """Send a message to a rank, or to all (None)."""
        content = encode(message)
        data = LENGTH.pack(len(content)) + content
        for connection in self._connections.values() if rank is None else [self._connections.get(rank)]:
            # A rank that has stopped reading gets no heartbeats, which would pile up.
            if connection is not None and not (connection.unsent and isinstance(message, messages.HubHeartbeat)):
                self._write(connection, data)

    def _write(self, connection: _Connection, data: bytes) -> None:
        had_unsent = bool(connection.unsent)
        connection.send(data)
        if bool(connection.unsent) != had_unsent:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
            self._selector.modify(connection.socket, events, connection)
