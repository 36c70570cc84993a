"""The probes of this host itself: its cores, its memory, its networks and its name."""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address

import psutil

from unitrain.commands.doctor.finding import Finding, Probe
from unitrain.launch.network.addresses import addresses_of, own_addresses
from unitrain.process import usable_cores


def _cpu() -> Finding:
    usable, total = usable_cores(), os.cpu_count()
    return Finding("ok", f"{usable} of {total} cores usable", details={"usable": usable, "total": total})


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    summary = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available"
    return Finding("ok", summary, details={"available": memory.available, "total": memory.total})


def _network() -> Finding:
    states = psutil.net_if_stats()
    interfaces = {
        name: [address.address for address in addresses if address.family in (socket.AF_INET, socket.AF_INET6)]
        for name, addresses in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }
    summary = ", ".join(f"{name} {' '.join(addresses)}".strip() for name, addresses in interfaces.items())
    return Finding("ok", summary or "no interface is up", details={"interfaces": interfaces})


def _host_name() -> Finding:
    """Return whether other hosts can reach what listens at the address of this host's own name.

    They can't if it is a loopback address, as Debian's installer has it (127.0.1.1).
    """
    name = socket.gethostname()
    found = addresses_of(name)
    own = [address for address in own_addresses() if address != name]
    details = {"name": name, "addresses": found}
    reachable = [address for address in found if not ip_address(address).is_loopback]
    if reachable:
        return Finding("ok", f"{name} is {', '.join(reachable)}", details=details)
    if not own:
        return Finding("ok", f"{name}; this host has no network to other hosts", details=details)
    what = f"is {', '.join(found)} here, a loopback address" if found else "can't be resolved here"
    summary = f"{name} {what}: launchers on several hosts can't be reached at this name. One host needs nothing."
    # As the first line: the first that has the name counts.
    return Finding("warning", summary, f"sudo sed -i '1i {own[0]} {name}' /etc/hosts", details)


MACHINE: dict[str, Probe] = {"cpu": _cpu, "memory": _memory, "network": _network, "host_name": _host_name}
