"""The emergency checkpoint: what a rank that survives the failure of another saves before the job ends.

It is a checkpoint like the others, and ``resume`` finds it as the newest one. It has the state of the last boundary
between two steps. The random number generators of all ranks are left out, since those of the rank that failed are lost:
they are seeded anew, as on another number of processes.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from unitrain.checkpoint import metric_states
from unitrain.checkpoint.emergency.last_boundary import LastBoundary, Recorded
from unitrain.checkpoint.emergency.spool import Spool, is_too_slow
from unitrain.checkpoint.run_state import RunState
from unitrain.checkpoint.store import manifest as manifests
from unitrain.checkpoint.store import storage
from unitrain.checkpoint.store.folder import RUN
from unitrain.checkpoint.store.lock import holder_of
from unitrain.checkpoint.store.manifest import DamagedError
from unitrain.checkpoint.writer import Writer
from unitrain.checkpoint.writing import check_part, write_part
from unitrain.errors import CheckpointError
from unitrain.job.watch.hub import Member
from unitrain.process import print_stderr
from unitrain.training.batch_norm.layers import is_unsynchronised

_THREADS = 4
# How long rank 0 may need for what it writes in the background.
_BEST_S = 5.0
_POLL_S = 0.02


class EmergencyCheckpoint:
    """Saves the state of the last boundary, as ``unitrain.job.watch.emergency.Saver``.

    Args:
        root: the folder of the checkpoints; None if it is in an object store.
        spool: where they are written first if that takes too long.
        seconds: time for the checkpoint.
        boundary: records the state.
        state: the run's.
        writer: writes the run's other checkpoints.
        rank: this rank.
        members: the processes of the job, of which the first holds the folder.
    """

    def __init__(
        self,
        root: Path | None,
        spool: Spool | None,
        seconds: float,
        boundary: LastBoundary,
        state: RunState,
        writer: Writer,
        rank: int,
        members: tuple[Member, ...],
    ) -> None:
        self._root = None if root is None else root.absolute()
        self._spool = spool
        self._seconds = seconds
        self._boundary = boundary
        self._state = state
        self._writer = writer
        self._rank = rank
        self._members = members
        self._recorded: Recorded | None = None

    def last_whole(self, patience_s: float) -> tuple[int | None, str]:
        """See ``Saver.last_whole``."""
        found = self._boundary.hold(patience_s)
        if isinstance(found, str):
            return None, found and f"rank {self._rank}: {found}"
        if found.step == (self._writer.resumed_from or 0):
            return None, ""
        if self._root is not None:
            if not is_here(self._root, self._members, self._rank):
                return None, ""
            newest = next(map(storage.step_of, storage.found(self._root)), -1)
            if newest >= found.step:
                return None, f"{self._root} has one of step {newest}" if newest > found.step else ""
        if self._state.prepared.swapped:
            return None, f"rank {self._rank}: the model had the weights of its average, after step {found.step}"
        if any(metric._update_count for metric in metric_states.metrics_in(self._state.modules).values()):
            return None, "the states of metrics would be those of one rank only"
        self._recorded = found
        return found.step, ""

    def release(self) -> None:
        """See ``Saver.release``."""
        self._writer.folder.release()

    def save(self) -> None:
        """See ``Saver.save``."""
        assert self._recorded is not None
        began = time.monotonic()
        under_way = self._writer.under_way
        if under_way is not None and self._root is not None:
            wait_for([under_way])  # it may be this very step's; an upload would take too long
        try:
            folder = self._write(self._recorded)
        except Exception as error:  # pickling may raise any exception
            print_stderr(f"unitrain: the emergency checkpoint could not be written: {error}")
            return
        if folder is None:
            return
        statistics = any(
            is_unsynchronised(layer) for module in self._state.modules.values() for layer in module.modules()
        )
        print_stderr(
            f"unitrain: emergency checkpoint: rank {self._rank} has saved the state after step {self._recorded.step} "
            f"in {folder} ({time.monotonic() - began:.1f} s)."
            + ("" if folder.parent == self._root else " The next start on this host moves it to the run's checkpoints.")
            + (" BatchNorm's running statistics are those of its samples." if statistics else "")
        )

    def _write(self, recorded: Recorded) -> Path | None:
        """Write the checkpoint, and return its folder; None if there is one of this step, or another rank writes it.

        It is not synced to the disk, for which there may be no time: only a failure of the host could damage it.
        """
        parts = self._boundary.applied_to(self._state.parts(), recorded)
        parts[RUN] = self._state.run(recorded.step, random=[])
        root = self._place(sum(leaf.nbytes for leaf in tree_leaves(parts) if isinstance(leaf, Tensor)))
        first, final = self._members[0], storage.folder_of(root, recorded.step)
        temporary = root / f".{final.name}.emergency-{first.pid}-{first.started}.tmp"
        if os.path.lexists(final):
            return None
        try:
            temporary.mkdir()
        except FileExistsError:
            return None
        try:
            with ThreadPoolExecutor(_THREADS, "emergency checkpoint") as threads:
                files = dict(threads.map(partial(_write_file, temporary), parts.items()))
            about = {**self._state.about(self._best()), "emergency": True}
            (temporary / storage.MANIFEST).write_text(manifests.to_json(recorded.step, about, files))
            changed = self._boundary.changed(recorded)
            if changed:
                raise CheckpointError(changed)
            if self._root is not None and not is_here(self._root, self._members, self._rank):
                raise CheckpointError(f"{self._root} was taken by another job")
            os.rename(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return final

    def _place(self, nbytes: int) -> Path:
        """Return where the checkpoint is written.

        Raises:
            CheckpointError: it can be written only to the spool, but not there either.
        """
        if self._root is not None and (self._spool is None or not is_too_slow(nbytes, self._seconds)):
            return self._root
        assert self._spool is not None
        try:
            self._spool.make(nbytes)
        except (CheckpointError, OSError):
            if self._root is None:
                raise
            return self._root  # the launcher may leave more time than it says
        return self._spool.folder

    def _best(self) -> int | None:
        """Return the step of the best checkpoint.

        Raises:
            CheckpointError: rank 0 has not written it: the dicts of this state would know a best that is not there.
        """
        marked = self._writer.marked
        if self._root is None:
            return self._writer.resumed_best if marked is None else marked
        if marked is not None:
            until = time.monotonic() + _BEST_S
            while not (storage.folder_of(self._root, marked) / storage.MANIFEST).exists():
                if time.monotonic() > until:
                    raise CheckpointError(f"the best one, of step {marked}, was not complete")
                time.sleep(_POLL_S)
            return marked
        for folder in storage.found(self._root):
            try:
                return manifests.read(folder).best
            except DamagedError:
                continue
        return None


def is_here(root: Path, members: Sequence[Member], rank: int) -> bool:
    """Return whether a folder is the one that rank 0 saves to, and not one of the same name on another host."""
    first, own = members[0], members[rank]
    try:
        holder = holder_of(root)
    except CheckpointError:
        return False
    if holder is None:  # rank 0 has closed it, or not come that far
        return root.is_dir() and own.host == first.host
    return (holder.host, holder.pid, holder.started) == (first.host, first.pid, first.started)


def _write_file(folder: Path, part: tuple[str, Any]) -> tuple[str, dict[str, Any]]:
    name, value = part
    path = folder / f"{name}.pt"
    described = write_part(path, value)
    check_part(path)
    return path.name, described
