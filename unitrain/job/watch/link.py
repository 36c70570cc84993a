"""A TCP connection for messages between a process and the hub of its job: the process's end, which may block."""

from __future__ import annotations

import os
import socket
import struct
import threading
import weakref
from multiprocessing.connection import Connection

from unitrain.job.watch.messages import Message, decode, encode

MOST_BYTES = 2**20
"""The longest message."""
LENGTH = struct.Struct("!i")
"""What stands before each message: its length, as ``multiprocessing.connection.Connection`` writes it."""

_sockets: weakref.WeakSet[socket.socket | Link] = weakref.WeakSet()


class Link:
    """One end of a connection. Any thread may send; only one may receive.

    Args:
        connection: a connected TCP socket, which the link takes ownership of.
    """

    def __init__(self, connection: socket.socket) -> None:
        # ``Connection`` reads the descriptor itself, and takes EAGAIN for an error.
        connection.setblocking(True)
        # Messages are short, and a verdict must not wait for more of them.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = Connection(connection.detach())
        self._sending = threading.Lock()
        close_in_children(self)

    def fileno(self) -> int:
        """Return the file descriptor, for ``multiprocessing.connection.wait``."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Send a message, from any thread. Blocks while the other end does not read.

        If the other end has gone, the message is lost: the thread that receives notices that.
        """
        with self._sending:
            try:
                self._connection.send_bytes(encode(message))
            except OSError:
                return  # the receiving thread notices it too

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message, or None on a timeout, a closed connection or an invalid message.

        Only one thread may call this.

        Args:
            timeout_s: how long to wait for it, in seconds; None for no limit.
        """
        try:
            if timeout_s is not None and not self._connection.poll(timeout_s):
                return None
            return decode(self._connection.recv_bytes(maxlength=MOST_BYTES))
        except (OSError, EOFError):
            return None

    def close(self) -> None:
        """Close this end."""
        self._connection.close()


def close_in_children(connection: socket.socket | Link) -> None:
    """Close a forked child's copy of a connection, so that the other end notices when the parent ends.

    Args:
        connection: is referenced weakly, and need not be removed when it is closed.
    """
    _sockets.add(connection)


def _close_all() -> None:
    # The set is weak, and may lose members while it is iterated over.
    for connection in list(_sockets):
        connection.close()


os.register_at_fork(after_in_child=_close_all)
