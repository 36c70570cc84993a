"""How fast a run trains and where its time goes: measured where a script asks for it, and nowhere else."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch

from unitrain.communicator import Communicator
from unitrain.data.sharding import MicroBatch


class Totals(NamedTuple):
    """What one process has measured so far. Times are the host's, in seconds."""

    samples: int = 0
    """Samples that its loaders have handed out for training."""
    seconds: float = 0.0
    """Time within iterations over these loaders."""
    data: float = 0.0
    """The part of it spent waiting for a batch."""
    step: float = 0.0
    """The part of it spent in ``step``, ``backward`` and ``update``, waiting for other ranks included."""


class Throughput:
    """Samples a second, the split of the time, and peak memory, over all ranks. Made by ``strategy.throughput()``.

    It needs to be told nothing: samples are counted, and the clock runs, while a loader of the strategy is iterated
    for training. An evaluation after the epoch takes none of that time; one within it is part of the rest.

    Args:
        communicator: of this process.
        devices: all devices that this process computes on.
    """

    def __init__(self, communicator: Communicator, devices: Sequence[torch.device]) -> None:
        self._communicator = communicator
        self._gpus = [device for device in devices if device.type == "cuda"]
        self._samples = 0
        self._seconds = self._data = self._step = 0.0
        self._iterations = 0  # that are under way
        self._iterating_since = 0.0
        self._stepping_since: float | None = None
        self._read = Totals()

    def totals(self) -> Totals:
        """Return what this process has measured since the beginning. Not collective; waits for no device."""
        now = perf_counter()
        iterating = now - self._iterating_since if self._iterations else 0.0
        stepping = 0.0 if self._stepping_since is None else now - self._stepping_since
        return Totals(self._samples, self._seconds + iterating, self._data, self._step + stepping)

    def read(self) -> dict[str, float]:
        """Return what was measured since the last reading, ready for a logger. Collective: one small gather.

        Returns:
            ``samples_per_second`` of all ranks together; ``data_seconds`` (waiting for a loader), ``step_seconds``
            (backward, averaging and optimizer, as the host sees them) and ``rest_seconds`` (all else within the
            training loop, forward included), means over the ranks; ``peak_memory_mb``, the largest of any rank since
            its start in MiB: allocated on its GPU, or resident where there is none. ``slowest_rank`` is the one that
            took longest to come to its steps, and ``slowest_ratio`` that time over the ranks' median: the others wait
            for it in theirs.
        """
        if self._iterations:
            self._await_device()
        totals = self.totals()
        since = [now - before for now, before in zip(totals, self._read, strict=True)]
        self._read = totals
        ranks = self._communicator.all_gather(torch.tensor([*since, self._peak_memory()], dtype=torch.float64))
        samples, seconds, memory = ranks[:, 0].sum().item(), ranks[:, 1].max().item(), ranks[:, 4].max().item()
        _, mean_seconds, data, step, _ = ranks.mean(0).tolist()
        own = ranks[:, 1] - ranks[:, 3]
        slowest, median = own.max(0), own.median().item()
        return {
            "samples_per_second": samples / seconds if seconds else 0.0,
            "data_seconds": data,
            "step_seconds": step,
            "rest_seconds": mean_seconds - data - step,
            "peak_memory_mb": memory / 2**20,
            "slowest_rank": slowest.indices.item(),
            "slowest_ratio": slowest.values.item() / median if median > 0 else 1.0,
        }

    def batches(self, fed: Iterator[tuple[MicroBatch, Any]]) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield what a loader feeds for training, and take note of it. The loader calls this."""
        since = perf_counter()
        if self._iterations == 0:
            self._iterating_since = since
        self._iterations += 1
        try:
            for micro_batch, batch in fed:
                self._data += perf_counter() - since
                self._samples += micro_batch.count
                yield micro_batch, batch
                since = perf_counter()
            self._data += perf_counter() - since
        finally:
            self._iterations -= 1
            if self._iterations == 0:
                self._await_device()  # what it computes still belongs to the samples that were counted
                self._seconds += perf_counter() - self._iterating_since

    def began(self) -> None:
        """``backward`` or ``update`` was called. The training step calls this."""
        self._stepping_since = perf_counter()

    def ended(self) -> None:
        """It has ended. The training step calls this."""
        if self._stepping_since is not None:
            self._step += perf_counter() - self._stepping_since
            self._stepping_since = None

    def _await_device(self) -> None:
        for device in self._gpus:
            torch.cuda.synchronize(device)

    def _peak_memory(self) -> int:
        """In bytes."""
        on_gpus = [torch.cuda.max_memory_allocated(device) for device in self._gpus]
        return max(on_gpus, default=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
