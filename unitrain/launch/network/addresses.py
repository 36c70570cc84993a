"""Network addresses: of this host and of host names, and connecting to rank 0."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import ip_address

from unitrain.errors import CommunicationError

_PROBE_S = 3.0


def own_addresses() -> list[str]:
    """Return the addresses of this host that other hosts can reach, IPv4 before IPv6, then its host name."""
    import psutil  # takes a while, and only jobs of several hosts need it

    found = [one for interface in psutil.net_if_addrs().values() for one in interface]
    addresses = [
        one.address
        for family in (socket.AF_INET, socket.AF_INET6)
        for one in found
        if one.family == family and not (ip_address(one.address).is_loopback or ip_address(one.address).is_link_local)
    ]
    return [*addresses, socket.gethostname()]


def addresses_of(name: str) -> list[str]:
    """Return the addresses of a host name on this host; none if it can't be resolved."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found))


def is_loopback(name: str) -> bool:
    """Return whether a host name has loopback addresses only, or none."""
    return all(ip_address(address).is_loopback for address in addresses_of(name))


def is_here(host: str) -> bool:
    """Return whether a host name or address is this host's."""
    own = own_addresses()
    return host == own[-1] or any(one in own or ip_address(one).is_loopback for one in addresses_of(host))


def reach(hosts: Sequence[str], port: int) -> socket.socket:
    """Return a connection to rank 0, at the first of its addresses that accepts one."""
    for host in hosts:
        try:
            return socket.create_connection((host, port), _PROBE_S)
        except OSError:
            continue
    raise CommunicationError(
        f"rank 0 can't be reached from this host: tried {', '.join(hosts)}, port {port}. Check for a firewall: ranks "
        "connect to rank 0 on ports that are chosen when the job starts, so all ports must be open between its hosts."
    )
