"""The probes of this host itself: its cores, its memory, its networks and its name."""

from __future__ import annotations

import os
import socket

import psutil

from unitrain.commands.doctor.finding import Finding, Probe
from unitrain.commands.doctor.host_name import host_name_finding


def _cpu() -> Finding:
    usable, total = len(os.sched_getaffinity(0)), os.cpu_count()
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
    return host_name_finding(socket.gethostname())


MACHINE: dict[str, Probe] = {"cpu": _cpu, "memory": _memory, "network": _network, "host_name": _host_name}
