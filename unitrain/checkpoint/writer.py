"""``Writer``: writes the checkpoints of a run one after another, in the background if that is wanted.

What is written is in host memory: files of GPU tensors can't be loaded where there is no GPU.
"""

from __future__ import annotations

import copy
import itertools
import os
import threading
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unitrain.checkpoint.sharded.saving import Portion, Shards, write_all, write_own
from unitrain.checkpoint.store.folder import Draft, Folder
from unitrain.communication.structure import tensors
from unitrain.device import streams_of
from unitrain.errors import CheckpointError

# What is being written in the background. This uses executors, which refuse work once the main thread has ended: a
# script may end with a save, so its end is waited for before that. A forked process has no thread that would end its
# parent's.
_writing: set[Future[None]] = set()
threading._register_atexit(lambda: wait(_writing))  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_writing.clear)


_STAYS = ("cpu", "meta")  # devices with tensors that are written as they are
Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor."""
Memory = list[tuple[Form, Tensor]]
"""Tensors in host memory, each with its form."""


class Background:
    """Writes one portion of a checkpoint after another from host memory, in a thread."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._memory: Memory = []  # of the last snapshot
        self.under_way: Future[None] | None = None  # what is being written, or was written last

    def run(self, portion: Portion, write: Callable[[Portion], None]) -> Future[None]:
        """Start to write a snapshot of a portion, once the previous one is written. The portion is emptied."""
        self.wait()  # its memory takes the new one
        copies: list[Any] = []
        copied = portion.copied(lambda state: snapshot(state, self._memory, self._thread, copies))
        # Tensors that are freed let other threads run: after submit, this one would wait until the new one has begun.
        portion.parts.clear()
        portion.shards.values.clear()
        self.under_way = writing = self._thread.submit(_write_after, copies, write, copied)
        _writing.add(writing)
        writing.add_done_callback(_writing.discard)
        return writing

    @property
    def busy(self) -> bool:
        """Whether something is being written."""
        return self.under_way is not None and not self.under_way.done()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self.under_way is not None:
            wait([self.under_way])

    def close(self, *, wait: bool) -> None:
        """End the thread after the write under way. Wait for that if ``wait`` is set."""
        self._thread.shutdown(wait=wait)


class Writer:
    """Writes checkpoints of a run, and keeps the newest and the best. Rank 0 writes; of shards, each rank its own.

    Checkpoints are named by their steps.

    Args:
        folder: where they are written.
        keep: number of the newest that are kept.
        background: whether to write them in a thread.
        patience_s: how long ranks that write a checkpoint together wait for one another.
        failed: called in the background when a checkpoint could not be written.

    Attributes:
        folder: as the argument.
        best: the step of the best checkpoint that is complete, which is kept; on rank 0 only.
        newest: the step of the newest checkpoint in the folder that this process knows of; on rank 0 only.
    """

    def __init__(
        self,
        folder: Folder,
        keep: int,
        *,
        background: bool,
        patience_s: float,
        failed: Callable[[], None],
    ) -> None:
        self.folder: Folder = folder
        self._keep = keep
        self._patience_s = patience_s
        self._failed = failed
        self._background = Background("checkpoint") if background else None
        self._under_way: Future[None] | None = None  # written in the background, and not finished yet
        self.best: int | None = None
        self._branched_at: int | None = None  # the step from which the run has resumed, until it saves again
        self.newest: int | None = None

    def discard(self) -> None:
        """Remove all checkpoints from the folder. On rank 0."""
        for step in self.folder.steps():
            self.folder.remove(step)
        self.best = self.newest = None

    def write(
        self, step: int, portion: Portion, about: Mapping[str, Any], *, best: bool, draft: Draft | None, writers: int
    ) -> None:
        """Write a checkpoint, or start to. On rank 0.

        Args:
            step: the number of steps, which is the name of the checkpoint.
            portion: rank 0's.
            about: the run's entries in the manifest.
            best: whether it is the best checkpoint so far.
            draft: where the ranks write it together; None if rank 0 writes alone.
            writers: the number of ranks that write.
        """

        def write(copied: Portion) -> None:
            best_step = step if best else self.best
            self.folder.check()
            if self._branched_at is not None:
                for newer in self.folder.steps():  # later ones of this run would not be the newest
                    if newer > self._branched_at:
                        self.folder.remove(newer)
                self._branched_at = None
            others = dict if draft is None else partial(write_all, draft, copied.shards, writers, self._patience_s)
            self.folder.write(step, copied.parts, {**about, "best": best_step}, draft, others)
            self.newest = step
            self.best = best_step  # not earlier: the previous best one is kept if this one can't be written
            self.folder.prune(self._keep, best_step)

        self._run(portion, write)

    def write_own(self, draft: Draft, rank: int, shards: Shards) -> None:
        """Write this rank's file of a checkpoint, or start to. Not on rank 0."""
        self._run(Portion({}, shards), lambda copied: write_own(draft, rank, copied.shards))

    def _run(self, portion: Portion, write: Callable[[Portion], None]) -> None:
        """Write a portion from host memory, or start to write a snapshot of it."""
        if self._background is None:
            write(portion.copied(on_host))
            return
        self._under_way = writing = self._background.run(portion, write)
        writing.add_done_callback(lambda done: None if done.exception() is None else self._failed())

    def finish(self) -> None:
        """Wait until the checkpoint in the background is written. Raises CheckpointError if it could not be."""
        error = None if self._under_way is None else self._under_way.exception()
        self._under_way = None
        if error is not None:
            raise CheckpointError(str(error)) from error

    def go_on_from(self, step: int) -> None:
        """Continue with the checkpoint of a step, as a branch: later checkpoints are another's."""
        self._branched_at = step

    def close(self, *, wait: bool) -> None:
        """End the background thread after the write under way. Wait for that if ``wait`` is set. Release the folder."""
        if self._background is not None:
            self._background.close(wait=wait)
        if self._under_way is None:
            self.folder.release()
        else:
            self._under_way.add_done_callback(lambda _: self.folder.release())


# -------------------------------------------------------------------------------------------------------- host memory


def snapshot(
    state: Any, memory: Memory | None = None, thread: Executor | None = None, copies: list[Any] | None = None
) -> Any:
    """Return a copy of nested state in host memory. Tensors that share their elements are one.

    Tensors on a GPU are copied asynchronously into pinned memory, each by the current stream of its device: what the
    script starts there later, such as the next step, comes after.

    Args:
        state: the nested state.
        memory: of an earlier snapshot, which becomes invalid. It is replaced by that of this one, which uses it again
            where the form is the same, as most of the cost is that of new memory.
        thread: copies a part of the state, if torch computes in a single thread, as under torchrun.
        copies: gets the events that the copies of GPU tensors end with; None to wait for them here.
    """
    memory = [] if memory is None else memory
    free, gpus = iter(memory.copy()), set[torch.device]()
    targets, sources = list[Tensor](), list[Tensor]()
    memory.clear()

    def copied(value: Tensor, form: Form | None) -> Tensor:
        if value.is_meta:
            return value
        if form is None:
            return value.to("cpu", copy=True)
        on_gpu = not value.is_cpu and streams_of(value.device) is not None
        if on_gpu:
            gpus.add(value.device)
        there, target = next(free, (None, value))
        if there != form:
            shape, stride, dtype = form
            # Not like the value itself, which may be on a device that evaluates lazily.
            like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            target = torch.empty_like(like, device="cpu", pin_memory=on_gpu)
        memory.append((form, target))
        targets.append(target)
        sources.append(value)
        return target

    with torch.no_grad():
        result = _copied(state, copied)
        # Only now, since the copies displace all that the lines above use from the processor's cache.
        if sources and all(source.is_cpu for source in sources):
            _copy(targets, sources, thread)
        else:  # not every device can
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=bool(gpus))
    events = [streams_of(device).current_stream(device).record_event() for device in gpus]
    if copies is None:
        _wait_for(events)
    else:
        copies += events
    return result


def _wait_for(events: Iterable[Any]) -> None:
    for event in events:
        event.synchronize()


def _write_after(copies: Iterable[Any], write: Callable[[Portion], None], portion: Portion) -> None:
    """Write a portion once its copies are complete, for which the script does not wait."""
    _wait_for(copies)
    write(portion)


@torch.no_grad()  # which is a thread's own
def _copy(targets: list[Tensor], sources: list[Tensor], thread: Executor | None = None) -> None:
    """Copy tensors on the CPU, half of the bytes in another thread if torch itself uses only one."""
    if thread is not None and len(sources) > 1 and torch.get_num_threads() == 1:
        sums = list(itertools.accumulate(source.nbytes for source in sources))
        half = min(bisect(sums, sums[-1] / 2) + 1, len(sources) - 1)
        rest = thread.submit(_copy, targets[half:], sources[half:])
        _copy(targets[:half], sources[:half])
        rest.result()
    else:
        torch._foreach_copy_(targets, sources)


def on_host(state: Any) -> Any:
    """Return nested state with copies in host memory of the tensors that are not there. Those that are one stay one."""
    is_there = all(tensor.device.type in _STAYS for tensor in tensors(state))
    return state if is_there else _copied(state, lambda x, _: x if x.device.type in _STAYS else x.detach().cpu())


def _copied(state: Any, copied: Callable[[Tensor, Form | None], Tensor]) -> Any:
    """Return a deep copy of nested state that has ``copied(tensor, form)`` in place of each tensor with other elements.

    The form is None unless the tensor is strided.
    """
    originals = list(tensors(state, opened=True))  # kept, since another object could get the id of one
    copies: dict[Any, Tensor] = {}
    memo: dict[int, Any] = {}
    for value in originals:
        form: Form | None = None
        elements: Any = id(value)
        if value.layout == torch.strided:
            form = value.shape, value.stride(), value.dtype
            elements = id(value.untyped_storage()), value.storage_offset(), form
        if elements not in copies:
            copies[elements] = copied(value, form)
        memo[id(value)] = copies[elements]
    return copy.deepcopy(state, memo)
