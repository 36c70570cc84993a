"""The processes that this one has started, and their CPU time, by one walk through /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")


class Descendant(NamedTuple):
    """A process as it was when it was looked at."""

    pid: int
    started: int
    """With the pid, what no other process has."""
    parent: int
    state: str
    own_s: float
    """CPU seconds of its threads."""
    reaped_s: float
    """CPU seconds of the children that it has waited for, and of theirs."""


def this_process() -> Descendant:
    """Return this process."""
    return _read("self")


def descendants() -> list[Descendant]:
    """Return the children of this process, their children and so on; none where there is no /proc.

    psutil takes ten times as long, and each test asks three times.
    """
    if not os.path.isdir("/proc/self"):
        return []
    children: dict[int, list[Descendant]] = {}
    for process in _all():
        children.setdefault(process.parent, []).append(process)
    found = children.get(os.getpid(), [])
    for process in found:  # which grows
        found += children.get(process.pid, [])
    return found


def _all() -> Iterator[Descendant]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                yield _read(name)
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                continue


def _read(name: str) -> Descendant:
    with open(f"/proc/{name}/stat", "rb") as file:
        pid, _, rest = file.read().partition(b" (")
    fields = rest[rest.rindex(b")") + 2 :].split()
    own, reaped = (int(fields[i]) + int(fields[i + 1]) for i in (11, 13))
    return Descendant(int(pid), int(fields[19]), int(fields[1]), fields[0].decode(), own / _TICKS, reaped / _TICKS)
