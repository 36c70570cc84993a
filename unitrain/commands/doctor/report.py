"""What ``unitrain doctor --hosts`` runs on each host: standard library only, since more may be missing.

Its argument is a JSON object: ``here``, the addresses and a port of the host that asks, and ``others``, the names of
the other hosts. It prints a JSON object.
"""

from __future__ import annotations

import json
import platform
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

_PROBE_S = 3.0
_SSH_PORT = 22


def versions() -> dict[str, str | None]:
    """Return the versions of what must be the same on all hosts; None if it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("unitrain", "torch", "horovod"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def name_is_loopback() -> bool:
    """Return whether this host's own name has loopback addresses only, or none."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return all(str(address[0]).startswith("127.") or address[0] == "::1" for *_, address in found)


def failure(address: tuple[str, int]) -> OSError | None:
    """Return why this host can't connect to an address and port; None if it can."""
    try:
        socket.create_connection(address, _PROBE_S).close()
    except OSError as error:
        return error
    return None


def main() -> None:
    """Print the report."""
    asked = json.loads(sys.argv[1])
    addresses, port = asked["here"]
    with ThreadPoolExecutor(32) as threads:
        failures = list(threads.map(failure, [(host, _SSH_PORT) for host in asked["others"]]))
        back = list(threads.map(failure, [(address, port) for address in addresses]))
    report = {
        "host": socket.gethostname(),
        "versions": versions(),
        "name_is_loopback": name_is_loopback(),
        "unreached": {
            host: "its name can't be resolved" if isinstance(error, socket.gaierror) else error.strerror or str(error)
            for host, error in zip(asked["others"], failures, strict=False)
            if error and not isinstance(error, ConnectionRefusedError)  # there is a route to a host that refuses
        },
        "reaches_back": None in back,
        "time": time.time(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
