"""A TCP connection for messages between a process and the hub of its job."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from multiprocessing.connection import Connection

from unitrain.job.messages import Message, decode, encode

_links: weakref.WeakSet[Link] = weakref.WeakSet()


class Link:
    """One end of a connection. Any thread may send; only one may receive.

    Args:
        connection: a connected TCP socket, which the link takes ownership of.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = Connection(connection.detach())
        self._sending = threading.Lock()
        _links.add(self)

    def fileno(self) -> int:
        """Return the file descriptor, for ``multiprocessing.connection.wait``."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Send a message. If the other end has gone, the message is lost."""
        with self._sending:
            try:
                self._connection.send_bytes(encode(message))
            except OSError:
                return  # the receiving thread notices it too

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message, or None on a timeout, a closed connection or an invalid message."""
        try:
            if timeout_s is not None and not self._connection.poll(timeout_s):
                return None
            return decode(self._connection.recv_bytes(maxlength=2**20))
        except (OSError, EOFError):
            return None

    def close(self) -> None:
        """Close this end."""
        _links.discard(self)
        self._connection.close()


def _forget_in_child() -> None:
    """Close a forked child's copies of connections, so that the other ends notice when the parent ends."""
    for link in list(_links):
        link.close()


os.register_at_fork(after_in_child=_forget_in_child)
