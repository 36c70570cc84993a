"""Reads the environment variables of a launcher. A missing or wrong one is an error with its value and a remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import ip_address

from unitrain.errors import LaunchError

OVERRIDE = "UNITRAIN_LAUNCHER"

_MOST = 1_000_000
"""Upper bound for numbers of processes and restarts."""
_A_HOST = "a host name or address"


class Variables:
    """The variables of one launcher; ``used`` are those that were read. ``remedy`` says what to do if one is wrong."""

    def __init__(self, environ: Mapping[str, str], launcher: str, remedy: str) -> None:
        self.environ = environ
        self.used: dict[str, str] = {}
        self._launcher = launcher
        self._remedy = remedy

    def __contains__(self, name: str) -> bool:
        return name in self.environ

    def string(self, name: str, wanted: str = "set") -> str:
        """Return the value of a variable that must not be empty."""
        value = self.environ.get(name)
        if not value:
            raise self.error(name, wanted)
        self.used[name] = value
        return value

    def matching(self, name: str, pattern: str, wanted: str) -> str:
        """Return the value of a variable that must match a pattern."""
        value = self.string(name, wanted)
        if not re.fullmatch(pattern, value, re.ASCII):
            raise self.error(name, wanted)
        return value

    def integer(self, name: str, low: int = 0, high: int = _MOST) -> int:
        """Return the value of a variable that must be an integer in a range."""
        wanted = f"an integer from {low} to {high}"
        value = int(self.matching(name, r"\d{1,18}", wanted))
        if not low <= value <= high:
            raise self.error(name, wanted)
        return value

    def host(self, name: str) -> str:
        """Return the value of a variable that must be a host name or address."""
        value = self.string(name, _A_HOST)
        if not is_host(value):
            raise self.error(name, _A_HOST)
        return value

    def address(self, host: str, port: str) -> str:
        """Return host:port from two variables."""
        return f"{self.host(host)}:{self.integer(port, 1, 65535)}"

    def error(self, name: str, wanted: str) -> LaunchError:
        """Return the error that a variable is missing or wrong."""
        state = f"is {self.environ[name]!r}" if name in self else "is not set"
        by = "the variables" if self._launcher == "env" else f"the variables of {self._launcher}"
        return LaunchError(
            f"{name} {state}, but must be {wanted}: {by} show that this process is part of a job. {self._remedy}, "
            f"or set {OVERRIDE}=python to run this process alone."
        )


def is_host(name: str) -> bool:
    """Return whether a string is a valid host name or IP address; digits and dots alone must be an address."""
    try:
        ip_address(name.partition("%")[0])
    except ValueError:
        label = r"(?!-)[\w-]{1,63}(?<!-)"
        return re.fullmatch(rf"({label}\.)*(?!\d+\.?$){label}\.?", name) is not None
    return True
