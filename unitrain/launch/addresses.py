"""Network addresses: those of this host, and connecting to rank 0's."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from unitrain.errors import CommunicationError

_PROBE_S = 3.0
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a network interface


def own_addresses() -> list[str]:
    """Return the addresses of this host that other hosts can reach, IPv4 before IPv6, then its host name."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, interface in socket.if_nameindex():
            request = struct.pack("256s", interface.encode()[:15])
            try:
                address = socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
            except OSError:
                continue  # no IPv4 address
            if not address.startswith("127."):
                addresses.append(address)
    return [*addresses, *_ipv6_addresses(), socket.gethostname()]


def _ipv6_addresses() -> list[str]:
    """Return the IPv6 addresses of global scope, which includes private (unique local) ones."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:  # a kernel without IPv6
        return []
    fields = [line.split() for line in lines]
    return [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(field[0])) for field in fields if field[3] == "00"]


def reach(hosts: Sequence[str], port: int) -> socket.socket:
    """Return a connection to rank 0, at the first of its addresses that accepts one.

    Raises:
        CommunicationError: none accepts a connection.
    """
    for host in hosts:
        try:
            return socket.create_connection((host, port), _PROBE_S)
        except OSError:
            continue
    raise CommunicationError(
        f"rank 0 can't be reached from this host: tried {', '.join(hosts)}, port {port}. Check for a firewall: ranks "
        "connect to rank 0 on ports that are chosen when the job starts, so all ports must be open between its hosts."
    )
