"""The ranks of a job that have a process on this host, found by the launcher's variables in their environments."""

from __future__ import annotations

import re

import psutil

from unitrain.launch.detect import LOCAL_RANKS, Launch

# What the ranks of a host have in common tells their job from others.
_OF_A_RANK = re.compile("RANK|PROCID|LOCALID")


class LocalRanks:
    """Finds the processes of a job on this host."""

    def __init__(self, launch: Launch) -> None:
        self._own = launch.local_rank
        evidence = dict(one.split("=", 1) for one in launch.evidence if "=" in one)
        self._job = {name: value for name, value in evidence.items() if not _OF_A_RANK.search(name)}
        self._variable = next((name for name in LOCAL_RANKS if name in evidence), None)

    def present(self) -> set[int]:
        """Return the local ranks that have a process, this one included."""
        found = {self._of(process) for process in psutil.process_iter()}
        return {self._own} | {rank for rank in found if rank is not None}

    def all_visible(self) -> bool:
        """Return whether this process sees the other ranks' processes: not from within a container of one rank.

        There, no ancestor is the launcher. ``unitrain.spawn`` sets the variables of a process that runs already.
        """
        if self._of(psutil.Process()) is None:
            return False
        return any(self._of(process) is None for process in psutil.Process().parents())

    def _of(self, process: psutil.Process) -> int | None:
        """Return the local rank of a process of this job, or None."""
        try:
            environ = process.environ()
        except (psutil.Error, OSError):  # it has ended, or is another user's
            return None
        value = environ.get(self._variable or "", "")
        same_job = all(environ.get(name) == shared for name, shared in self._job.items())
        return int(value) if same_job and value.isdecimal() else None
