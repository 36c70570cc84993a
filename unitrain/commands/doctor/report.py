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
    """Return whether this host's own name is that of a loopback address, or of none."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return all(str(address[0]).startswith("127.") or address[0] == "::1" for *_, address in found)


def why_unreached(host: str, port: int) -> str | None:
    """Return why a host can't be reached from this one; None if it can."""
    try:
        socket.create_connection((host, port), _PROBE_S).close()
    except ConnectionRefusedError:
        return None  # by the host, so there is a route
    except socket.gaierror:
        return "its name can't be resolved"
    except OSError as error:
        return str(error.strerror or error)
    return None


def main() -> None:
    """Print the report."""
    asked = json.loads(sys.argv[1])
    with ThreadPoolExecutor(32) as threads:
        reasons = list(threads.map(lambda host: why_unreached(host, _SSH_PORT), asked["others"]))
        addresses, port = asked["here"]
        # Refused is as bad here: there is a listener.
        back = [threads.submit(_connects, address, port) for address in addresses]
        reaches_back = any(one.result() for one in back)
    report = {
        "host": socket.gethostname(),
        "versions": versions(),
        "name_is_loopback": name_is_loopback(),
        "unreached": {host: why for host, why in zip(asked["others"], reasons, strict=False) if why},
        "reaches_back": reaches_back,
        "time": time.time(),
    }
    print(json.dumps(report))


def _connects(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), _PROBE_S).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
