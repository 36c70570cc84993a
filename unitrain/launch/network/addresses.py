"""Network addresses: of this host and of host names, and connecting to rank 0."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address

from unitrain.errors import CommunicationError

_PROBE_S = 3.0


def own_addresses() -> list[str]:
    """Return the addresses of this host that other hosts can reach, IPv4 before IPv6, then its host name."""
    import psutil  # takes a while, and only jobs of several hosts need it

    entries = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = [ip_address(entry.address) for family in families for entry in entries if entry.family == family]
    return [*(str(ip) for ip in addresses if not (ip.is_loopback or ip.is_link_local)), socket.gethostname()]


def addresses_of(name: str) -> list[str]:
    """Return the addresses of a host name, as this host resolves it; none if it can't be resolved.

    May block for seconds, while a name server does not answer.
    """
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    # In the order of the resolver, which prefers one. "%" begins the interface of a link-local address.
    return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in entries))


def is_loopback(name: str) -> bool:
    """Return whether a host name has loopback addresses only, or none."""
    return all(ip_address(address).is_loopback for address in addresses_of(name))


def reach(hosts: Sequence[str], port: int) -> socket.socket:
    """Return a connection to rank 0, at the first of its addresses that accepts one.

    Args:
        hosts: addresses and the name of rank 0's host, tried in this order.
        port: the port that rank 0 listens at.

    Raises:
        CommunicationError: none accepts a connection within 3 s.
    """
    for host in hosts:
        with suppress(OSError):
            return socket.create_connection((host, port), _PROBE_S)
    raise CommunicationError(
        f"rank 0 can't be reached from this host: tried {', '.join(hosts)}, port {port}. Check for a firewall: ranks "
        "connect to rank 0 on ports that are chosen when the job starts, so all ports must be open between its hosts."
    )
