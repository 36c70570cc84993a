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
    """The variables of one launcher: reads and checks them, and records those that were read.

    Args:
        environ: the environment.
        launcher: the name of the launcher, for messages.
        remedy: what to do if a variable is wrong, for messages.

    Attributes:
        environ: the environment.
        used: the variables that were read, with their values.
    """

    def __init__(self, environ: Mapping[str, str], launcher: str, remedy: str) -> None:
        self.environ = environ
        self.used: dict[str, str] = {}
        self._launcher = launcher
        self._remedy = remedy

    def __contains__(self, name: str) -> bool:
        return name in self.environ

    def string(self, name: str, wanted: str = "set") -> str:
        """Return the value of a variable that must not be empty.

        Args:
            name: its name.
            wanted: what it must be, in words that follow "must be", for the message.

        Raises:
            LaunchError: it is not set, or empty.
        """
        value = self.environ.get(name)
        if not value:
            raise self.error(name, wanted)
        # Errors of a backend name what was read: the user sees which variable misled it.
        self.used[name] = value
        return value

    def matching(self, name: str, pattern: str, wanted: str) -> str:
        """Return the value of a variable that must match a pattern, from end to end.

        Args:
            name: its name.
            pattern: a regular expression.
            wanted: as in ``string``.
        """
        value = self.string(name, wanted)
        if not re.fullmatch(pattern, value, re.ASCII):
            raise self.error(name, wanted)
        return value

    def integer(self, name: str, low: int = 0, high: int = _MOST) -> int:
        """Return the value of a variable that must be an integer from ``low`` to ``high``."""
        wanted = f"an integer from {low} to {high}"
        # More digits than any number of processes has, so that int() never gets a long string.
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
        """Return host:port from two variables, given their names."""
        return f"{self.host(host)}:{self.integer(port, 1, 65535)}"

    def error(self, name: str, wanted: str) -> LaunchError:
        """Return the error that a variable is missing or wrong."""
        state = f"is {self.environ[name]!r}" if name in self else "is not set"
        # env is no program that a user has started.
        by = "the variables" if self._launcher == "env" else f"the variables of {self._launcher}"
        return LaunchError(
            f"{name} {state}, but must be {wanted}: {by} show that this process is part of a job. {self._remedy}, "
            f"or set {OVERRIDE}=python to run this process alone."
        )


def is_host(name: str) -> bool:
    """Return whether a string is a valid host name or IP address; digits and dots alone must be an address.

    Underscores are allowed, as some clusters have them, though RFC 1123 does not.
    """
    try:
        ip_address(name.partition("%")[0])
    except ValueError:
        label = r"(?!-)[\w-]{1,63}(?<!-)"
        return re.fullmatch(rf"({label}\.)*(?!\d+\.?$){label}\.?", name) is not None
    return True
