"""The ranks of a job that have a process on this host, found by the launcher's variables in their environments."""

from __future__ import annotations

import os
import re

import psutil

from unitrain.launch.copies import JOBS
from unitrain.launch.detect import LOCAL_RANKS, Launch

# What the ranks of a host have in common tells their job from others.
_OF_A_RANK = re.compile("RANK|PROCID|LOCALID")
_JOB_IDS = (*JOBS, "PALS_APID", "PMIX_NAMESPACE")


class LocalRanks:
    """Finds the processes of a job on this host.

    Args:
        launch: how this process was started. The variables that it was read from tell the job's processes from others.
    """

    def __init__(self, launch: Launch) -> None:
        self._local_rank = launch.local_rank
        evidence = dict(variable.split("=", 1) for variable in launch.evidence if "=" in variable)
        # The address of the rendezvous, the job id and the world size are the same for all ranks.
        self._job = {name: value for name, value in evidence.items() if not _OF_A_RANK.search(name)}
        self._job |= {name: os.environ[name] for name in _JOB_IDS if name in os.environ}
        self._variable = next((name for name in LOCAL_RANKS if name in evidence), None)

    def present(self) -> dict[int, list[psutil.Process]]:
        """Return the local ranks that have processes, this one included, and all of these: a rank's children, too.

        Reads the environment of every process.
        """
        present: dict[int, list[psutil.Process]] = {self._local_rank: []}
        for process in psutil.process_iter():
            rank = self._of(process)
            if rank is not None:
                present.setdefault(rank, []).append(process)
        return present

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
            # As the process was started: what it has set itself since is not in it.
            environ = process.environ()
        except (psutil.Error, OSError):  # it has ended, or is another user's
            return None
        value = environ.get(self._variable or "", "")
        same_job = all(environ.get(name) == shared for name, shared in self._job.items())
        return int(value) if same_job and value.isdecimal() else None
