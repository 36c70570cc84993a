"""The emergency checkpoint: what a rank that survives the failure of another saves before the job ends.

It is a checkpoint like the others, and ``resume`` finds it as the newest one. It has the state of the last boundary
between two steps. The random number generators of all ranks are left out, since those of the rank that failed are lost:
they are seeded anew, as on another number of processes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import wait as wait_for
from pathlib import Path

from unitrain.checkpoint import metric_states
from unitrain.checkpoint.emergency.last_boundary import LastBoundary, Recorded
from unitrain.checkpoint.run_state import RunState
from unitrain.checkpoint.sharded.opening import best_in
from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.folder import Folder
from unitrain.checkpoint.store.located import RUN
from unitrain.checkpoint.store.lock import holder_of
from unitrain.checkpoint.writer import Writer
from unitrain.errors import CheckpointError
from unitrain.job.watch.hub import Member
from unitrain.process import print_stderr
from unitrain.training.batch_norm.layers import is_unsynchronised


class EmergencyCheckpoint:
    """Saves the state of the last boundary, as ``unitrain.job.watch.emergency.Saver``.

    ``members`` are the processes of the job, of which the first holds the folder.
    """

    def __init__(
        self, root: Path, boundary: LastBoundary, state: RunState, writer: Writer, rank: int, members: Sequence[Member]
    ) -> None:
        self._root = root.absolute()
        # There may be no time to sync files: only a failure of the host could damage them.
        self._folder = Folder(Disk(self._root, durable=False))
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
        if not self._is_here():
            return None, ""
        newest = next(iter(self._folder.steps()), -1)
        if newest >= found.step:
            return None, f"{self._root} has one of step {newest}" if newest > found.step else ""
        if self._state.prepared.swapped_modules:
            return None, f"rank {self._rank}: the model had the weights of its average, after step {found.step}"
        if any(metric.update_count for metric in metric_states.metrics_in(self._state.modules).values()):
            return None, "the states of metrics would be those of one rank only"
        self._recorded = found
        return found.step, ""

    def release(self) -> None:
        """See ``Saver.release``."""
        self._writer.release()

    def save(self) -> None:
        """See ``Saver.save``."""
        assert self._recorded is not None
        began, step = time.monotonic(), self._recorded.step
        under_way = self._writer.under_way
        if under_way is not None:
            wait_for([under_way])  # it may be this very step's
        # If rank 0 is gone, nobody elects one, and every rank tries: the one that makes this file writes.
        first = self._members[0]
        claim = self._root / f".emergency-{step}-{first.host}-{first.pid}-{first.started}"
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            return
        except OSError:
            pass  # a full disk, say: writing will tell
        try:
            if step in self._folder.steps():
                return
            self._write(self._recorded)
        except Exception as error:  # pickling may raise any exception
            print_stderr(f"unitrain: the emergency checkpoint could not be written: {error}")
            return
        finally:
            claim.unlink(missing_ok=True)
        layers = [layer for module in self._state.modules.values() for layer in module.modules()]
        statistics = " BatchNorm's running statistics are those of its samples."
        print_stderr(
            f"unitrain: emergency checkpoint: rank {self._rank} has saved the state after step {step} in "
            f"{self._folder.name(step)} ({time.monotonic() - began:.1f} s)."
            + (statistics if any(map(is_unsynchronised, layers)) else "")
        )

    def _write(self, recorded: Recorded) -> None:
        parts = self._boundary.applied_to(self._state.parts(), recorded)
        parts[RUN] = self._state.run(recorded.step, random=[])
        draft = self._folder.begin(recorded.step)
        try:
            files = draft.write(parts)
            about = {**self._state.about(self._best()), "emergency": True}
            changed = self._boundary.changed(recorded)
            if changed:
                raise CheckpointError(changed)
            if not self._is_here():
                raise CheckpointError(f"{self._root} was taken by another job")
            draft.complete(recorded.step, about, files)
        except BaseException:
            self._folder.store.unmake(draft.name)
            raise

    def _best(self) -> int | None:
        """Return the step of the best checkpoint. Raises CheckpointError if rank 0 has not completed it."""
        steps, marked = self._folder.steps(), self._writer.marked
        if marked is not None:
            if marked not in steps:
                raise CheckpointError(f"the best one, of step {marked}, is not complete")
            return marked
        return best_in(self._folder)

    def _is_here(self) -> bool:
        """Return whether the folder is the one that rank 0 saves to, and not one of the same name on another host."""
        first, own = self._members[0], self._members[self._rank]
        try:
            holder = holder_of(self._folder.store)
        except CheckpointError:
            return False
        if holder is None:  # rank 0 has closed it, or not come that far
            return self._root.is_dir() and own.host == first.host
        return (holder.host, holder.pid, holder.started) == (first.host, first.pid, first.started)
