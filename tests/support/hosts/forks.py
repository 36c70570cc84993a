"""Forked scripts: processes that share one import of torch, which takes longer than what most tests have them do.

They are what ``python script.py`` would start, except that nobody can read their command and environment from outside.
What a library reads from the environment when it is imported can't be set for them (``OMP_NUM_THREADS``, say).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import psutil
from jobs import LEAVE_S, end_marked
from places import TESTS

# Of the server, which the first script starts, and which stays. It also marks all that it forks, for ``end_marked``.
_ADDRESS = f"unitrain-forks-{os.getpid()}"
_server: subprocess.Popen[bytes] | None = None


def command(*script: str) -> list[str]:
    """Return the command that runs a script, given with its arguments, in a forked process, as ``python`` would."""
    global _server
    if _server is None:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"\0{_ADDRESS}")
            listening.listen()
            _server = subprocess.Popen(
                [sys.executable, str(TESTS / "programs" / "fork_server.py"), str(listening.fileno())],
                env={**os.environ, "TESTS_JOB": _ADDRESS},
                pass_fds=[listening.fileno()],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
    return [sys.executable, "-I", "-S", str(TESTS / "programs" / "forked.py"), _ADDRESS, *script]


def is_forked(command: object) -> bool:
    """Whether a command runs a script in a forked process."""
    return _ADDRESS in str(command)


def running() -> list[psutil.Process]:
    """Return the forked processes."""
    if _server is None:
        return []
    watchers = psutil.Process(_server.pid).children()
    return [script for watcher in watchers if watcher.is_running() for script in watcher.children()]


def end_left() -> tuple[str, ...]:
    """Kill what scripts have left running, and return descriptions."""
    return () if _server is None else end_marked(_ADDRESS, LEAVE_S, but=pids())


def pids() -> set[int]:
    """Return the server, if it runs."""
    return set() if _server is None else {_server.pid}


def close() -> None:
    """End the server."""
    global _server
    if _server is not None:
        _server.communicate()
        _server = None
