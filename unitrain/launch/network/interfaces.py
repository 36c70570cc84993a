"""The network interface that leads to the other hosts of a job, for gloo.

gloo listens at the address of this host's name: other hosts can't connect if it is a loopback one, as on Debian.
"""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address

import psutil
from torch.distributed import PrefixStore, Store

from unitrain.launch.detect import Launch
from unitrain.launch.network.addresses import is_loopback

_VARIABLE = "GLOO_SOCKET_IFNAME"
_ANY_PORT = 9  # a route is looked up, and nothing is sent


def choose_gloo_interface(store: Store, launch: Launch) -> None:
    """Set gloo's variable if it would listen where other hosts can't connect. All ranks of several hosts call this.

    The user's choice, in GLOO_SOCKET_IFNAME, is left as it is. Blocks on rank 0 until a rank of another host has come.

    Args:
        store: a store that the ranks share; rank 0's host is read from it.
        launch: how this process was started.
    """
    # A host asks for its route to rank 0's, and rank 0's host for that to another, the first in the order of ranks.
    to_rank_0 = _own_address_towards(_host(store))
    store.set(_key(launch.rank), to_rank_0 or "")
    if _VARIABLE in os.environ or not is_loopback(socket.gethostname()):
        return
    local_address = to_rank_0
    others = (store.get(_key(rank)).decode() for rank in range(launch.world_size))
    if local_address is None and (other := next(filter(None, others), None)):
        local_address = _own_address_towards(other)
    # gloo takes the name of an interface, and not an address.
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == local_address for address in addresses):
            os.environ[_VARIABLE] = interface


def _key(rank: int) -> str:
    """Return the key of the address that a rank's host has towards rank 0."""
    return f"address of rank {rank} on its way to rank 0"


def _host(store: Store) -> str:
    """Return the host at which the store is open, or an empty string if the store does not tell."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def _own_address_towards(host: str) -> str | None:
    """Return this host's address on the route to another; None if that is this host, or there is no route."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # For UDP, this chooses a local address by the routing table, and sends nothing.
            probe.connect(address)
            local_address = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if local_address == address[0] or ip_address(local_address).is_loopback else local_address
