"""The spool: this host's memory, where an emergency checkpoint is written if its own folder may be too slow for it.

A launcher kills the survivors of a failure within seconds. An object store, or a large state on a disk, takes longer.
The next start of the run on this host moves the checkpoint to the folder; if the host is lost, so is the checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from unitrain.checkpoint.store import storage
from unitrain.checkpoint.store.folder import Folder
from unitrain.checkpoint.store.manifest import DamagedError
from unitrain.communication.communicator import Communicator
from unitrain.errors import CheckpointError
from unitrain.job.watch.hub import Member
from unitrain.process import print_stderr

MEMORY = Path("/dev/shm")
# What identifies a run. It is kept beside the checkpoints: whoever empties their folder begins another run.
_RUN_ID = re.compile(r"[0-9a-f]{32}")
# Slower than any disk that a model is trained from: what may take longer than the launcher leaves is spooled.
_SLOWEST_DISK = 100 * 2**20
_STALE_DAYS = 7
_DAY_S = 24 * 3600


def is_too_slow(nbytes: int, seconds: float) -> bool:
    """Return whether so many bytes might not be written to a disk in the time."""
    return nbytes > _SLOWEST_DISK * seconds


class Spool:
    """The spooled checkpoints of a run on this host.

    Args:
        run: identifies the run.

    Attributes:
        folder: has the checkpoints, as the folder of a run has.

    Raises:
        CheckpointError: the identity of the run is damaged.
    """

    def __init__(self, run: str) -> None:
        self._all = MEMORY / f"unitrain-{os.getuid()}"
        self.folder: Path = self._all
        self.belong_to(run)

    def belong_to(self, run: str) -> None:
        """Hold the checkpoints of this run from now on, and not those of another one."""
        if not _RUN_ID.fullmatch(run):
            raise CheckpointError(f"the identity of a run is not {run[:50]!r}: remove the file run-id of its folder.")
        self.folder = self._all / run

    def make(self, nbytes: int) -> None:
        """Make the folder for a checkpoint.

        Raises:
            CheckpointError: there is no room for it, or the folder is not this user's.
        """
        free = min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available)
        if nbytes > free:
            raise CheckpointError(f"{MEMORY} has room for {free} bytes, and {nbytes} are needed")
        self._all.mkdir(mode=0o700, exist_ok=True)
        if not self._is_own():
            raise CheckpointError(f"{self._all} is not a folder that only this user can use")
        self.folder.mkdir(mode=0o700, exist_ok=True)

    def _is_own(self) -> bool:
        """Return whether there is a spool of this user: anybody can make a folder of that name."""
        try:
            found = self._all.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077

    def newest(self) -> int | None:
        """Return the step of the newest checkpoint, which may be damaged, or None."""
        return next(map(storage.step_of, storage.found(self.folder)), None) if self._is_own() else None

    def move(self, step: int, folder: Folder) -> None:
        """Move a checkpoint to the run's own folder.

        Raises:
            DamagedError: it is damaged, or refers to a checkpoint that is not there.
            CheckpointError: it can't be written there.
        """
        source = storage.folder_of(self.folder, step)
        manifest = storage.verify(source)
        if manifest.best is not None and manifest.best not in folder.steps():
            raise DamagedError(f"{source}: the best checkpoint, of step {manifest.best}, was not completed")
        folder.take(step, source)
        print_stderr(f"unitrain: moved the emergency checkpoint of step {step} from {source} to {folder}.")
        storage.discard(source)

    def clear(self) -> None:
        """Remove the run's checkpoints."""
        if self._is_own():
            shutil.rmtree(self.folder, ignore_errors=True)

    def remove_stale(self) -> None:
        """Remove what other runs have left here long ago."""
        for folder in self._all.iterdir() if self._is_own() else ():
            with suppress(OSError):
                days = (time.time() - folder.stat().st_mtime) / _DAY_S
                if folder != self.folder and days > _STALE_DAYS:
                    shutil.rmtree(folder)
                    print_stderr(
                        f"unitrain: removed {folder}, an emergency checkpoint of a run of {days:.0f} days ago."
                    )


def collect(ranks: Communicator, members: Sequence[Member], folder: Folder, spool: Spool, *, is_here: bool) -> None:
    """Move the newest spooled checkpoint of all hosts to the run's folder, unless that has a newer one. Collective.

    Args:
        ranks: the communicator.
        members: the processes of the job; none in a world of one.
        folder: that of the run.
        spool: that of the run, on this host.
        is_here: whether this process can write to the folder.

    Raises:
        CheckpointError: it can't be moved; on every rank.
    """
    hosts = [member.host for member in members] or [""]
    is_first = hosts.index(hosts[ranks.rank]) == ranks.rank
    if is_first:
        spool.remove_stale()
    while True:
        own = spool.newest() if is_first and is_here else None
        offered = ranks.all_gather_data(own)
        newest = max((step for step in offered if step is not None), default=-1)
        if newest <= ranks.on_main(lambda: next(iter(folder.steps()), -1)):
            break
        failed = ""
        if offered.index(newest) == ranks.rank:
            try:
                spool.move(newest, folder)
            except DamagedError as error:
                print_stderr(f"unitrain: skipping a damaged emergency checkpoint: {error}")
                storage.discard(storage.folder_of(spool.folder, newest))
            except CheckpointError as error:
                failed = str(error)
        if errors := [error for error in ranks.all_gather_data(failed) if error]:
            raise CheckpointError(errors[0])
    if is_first and is_here:
        spool.clear()  # what is older than the newest
