"""Whether a host's own name leads other programs to an address that other hosts can reach.

What listens at the address of its host's name can't be reached from other hosts if that is a loopback address, as
Debian's installer has it (127.0.1.1).
"""

from __future__ import annotations

import re
import socket
from ipaddress import ip_address
from pathlib import Path

from unitrain.commands.doctor.finding import Finding
from unitrain.launch.network.addresses import own_addresses

_HOSTS = Path("/etc/hosts")


def host_name_finding(name: str) -> Finding:
    """Return whether this host's name has an address that other hosts can reach."""
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
    return Finding("warning", summary, _fix(name, own[0], _HOSTS), details)


def addresses_of(name: str) -> list[str]:
    """Return the addresses at which a host is known here; none if its name can't be resolved."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found))


def _fix(name: str, address: str, hosts: Path) -> str:
    """Return the command that gives this host's name an address in /etc/hosts."""
    entry = f"{address} {name}"
    lines = hosts.read_text(errors="replace").splitlines() if hosts.is_file() else []
    if not any(name in line.partition("#")[0].split()[1:] for line in lines):
        return f"echo '{entry}' | sudo tee -a /etc/hosts"
    taken_out = rf"s/\s{re.escape(name)}\(\s\|$\)/\1/g"
    return f"sudo sed -i -e '{taken_out}' -e '$a {entry}' /etc/hosts"
