"""``Writer``: writes the checkpoints of a run one after another, in the background if that is wanted."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

from unitrain.checkpoint.run_state import RunState
from unitrain.checkpoint.sharded.saving import Shards, write_all, write_own
from unitrain.checkpoint.snapshot import on_host, snapshot
from unitrain.checkpoint.store.folder import Draft, Folder
from unitrain.errors import CheckpointError

# What is being written in the background. This uses executors, which refuse work once the main thread has ended: a
# script may end with a save, so its end is waited for before that. A forked process has no thread that would end its
# parent's.
_writing: set[Future[None]] = set()
threading._register_atexit(lambda: wait(_writing))  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_writing.clear)


class Together(NamedTuple):
    """A checkpoint that several ranks write, as one of them sees it."""

    draft: Draft
    shards: Shards
    """What this rank writes."""
    writers: int
    """The number of ranks that write."""


class Writer:
    """Writes checkpoints of a run, and keeps the newest and the best. Rank 0 writes; of shards, each rank its own.

    Args:
        folder: that of the checkpoints.
        state: the run's, for the manifests.
        keep: number of checkpoints to keep, beside the best.
        background: whether this rank writes while training continues.
        patience_s: how long ranks that write a checkpoint together wait for one another, in seconds.
        failed: called, in the background, when rank 0 could not write a checkpoint.

    Attributes:
        folder: as given.
        under_way: what is written in the background, or was written last and is not finished yet.
        best: the step of the best checkpoint that is complete, if any; on rank 0 only.
        resumed_from: the step that the run was resumed from, if any.
        marked: the step that this run saved as the best last, or is saving, if any.
    """

    def __init__(
        self,
        folder: Folder,
        state: RunState,
        keep: int,
        *,
        background: bool,
        patience_s: float,
        failed: Callable[[], None],
    ) -> None:
        self.folder: Folder = folder
        self._state = state
        self._keep = keep
        self._patience_s = patience_s
        self._failed = failed
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._snapshot: dict[str, Any] | None = None
        self._began = False
        self.under_way: Future[None] | None = None
        self.best: int | None = None
        self.resumed_from: int | None = None
        self.marked: int | None = None

    def write(self, step: int, parts: dict[str, Any], together: Together | None, *, best: bool) -> None:
        """Write what rank 0 writes alone and what several ranks write, or start to write a snapshot. On rank 0."""
        values = {} if together is None else together.shards.values
        if self._thread is None:
            self._write(step, on_host(parts), together, on_host(values), best)
            return
        self._snapshot = snapshot({"alone": parts, "shards": values}, self._snapshot)
        copies = self._snapshot["alone"], together, self._snapshot["shards"]
        writing = self._thread.submit(self._write, step, *copies, best)
        self._started(writing)
        writing.add_done_callback(self._report)

    def write_own(self, together: Together, rank: int) -> None:
        """Write this rank's file of a checkpoint, or start to write a snapshot of it. Not on rank 0."""
        draft, shards = together.draft, together.shards
        if self._thread is None:
            write_own(draft, rank, shards._replace(values=on_host(shards.values)))
            return
        if self.under_way is not None:
            wait([self.under_way])  # rank 0 has finished, so this is about to
        self._snapshot = snapshot(shards.values, self._snapshot)
        self._started(self._thread.submit(write_own, draft, rank, shards._replace(values=self._snapshot)))

    def _started(self, writing: Future[None]) -> None:
        self.under_way = writing
        _writing.add(writing)
        writing.add_done_callback(_writing.discard)

    def _report(self, writing: Future[None]) -> None:
        if writing.exception() is not None:
            self._failed()

    def _write(
        self, step: int, parts: dict[str, Any], together: Together | None, values: dict[str, Any], best: bool
    ) -> None:
        best_step = step if best else self.best
        about = self._state.about(best_step)
        self.folder.check()
        if not self._began:
            self._remove_newer()
            self._began = True
        if together is None:
            self.folder.write(step, parts, about)
        else:
            shards = together.shards._replace(values=values)
            others = partial(write_all, together.draft, shards, together.writers, self._patience_s)
            self.folder.write(step, parts, about, together.draft, others)
        self.best = best_step  # not before: what was the best is kept if this one can't be written
        self.folder.point_to_best(best_step)
        self.folder.prune(self._keep, best_step)

    def _remove_newer(self) -> None:
        """Remove checkpoints newer than the one that was resumed: later ones of this run would not be the newest."""
        for step in self.folder.steps():
            if self.resumed_from is not None and step > self.resumed_from:
                self.folder.remove(step)

    def finish(self) -> None:
        """Wait until the checkpoint in the background is written. Raises CheckpointError if it could not be."""
        writing, self.under_way = self.under_way, None
        error = None if writing is None else writing.exception()
        if error is not None:
            raise CheckpointError(str(error)) from error

    def go_on_from(self, step: int) -> None:
        """Continue with the checkpoint of a step, as a branch of its own: later checkpoints are another's."""
        self.resumed_from = step
        self.marked = None
        self._began = False

    def close(self, *, wait: bool) -> None:
        """End the background and let other jobs use the folder, after what is under way.

        That is waited for if ``wait`` is set.
        """
        if self._thread is not None:
            self._thread.shutdown(wait=wait)
        if self.under_way is None:
            self.folder.release()
        else:
            self.under_way.add_done_callback(lambda _: self.folder.release())
