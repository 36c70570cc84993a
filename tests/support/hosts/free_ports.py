"""Ports for programs that have to be told one.

They are below the range from which Linux gives ports to sockets by itself: from there, a test that runs beside could
get the port before the program listens. They don't come from ``random``, which tests seed: workers would get the same.
"""

import secrets
import socket
from contextlib import ExitStack, suppress

_PORTS = range(20_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Return different ports of 127.0.0.1 on which nothing listens."""
    found: list[int] = []
    with ExitStack() as opened:
        while len(found) < count:
            probe, port = opened.enter_context(socket.socket()), secrets.choice(_PORTS)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(port)
    return found


def free_port() -> int:
    """Return one such port."""
    return free_ports(1)[0]
