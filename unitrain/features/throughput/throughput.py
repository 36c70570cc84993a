"""Throughput of training and where its time goes. Costs nothing unless a script asks for it."""

from __future__ import annotations

import resource
import sys
from time import perf_counter
from typing import NamedTuple

import torch

from unitrain.data.loop import Batches
from unitrain.device import accelerator, devices_of
from unitrain.training.feature import Feature
from unitrain.training.loop.sockets import Sockets

_UNIT = 1 if sys.platform == "darwin" else 1024  # of the peak that the system tells, in bytes


class Totals(NamedTuple):
    """Measurements of one process so far. Times are host times in seconds."""

    samples: int = 0
    """Samples that its loaders have yielded for training."""
    seconds: float = 0.0
    """Time spent in iterations over these loaders."""
    data: float = 0.0
    """The part of it spent waiting for a batch."""
    step: float = 0.0
    """The part of it spent in ``step``, ``backward`` and ``update``, including waits for other ranks."""


class Throughput(Feature):
    """Measures samples per second, time and peak memory over all ranks, from the moment when it is added to a run.

    Samples are counted, and time is measured, while a loader of the strategy is iterated for training. An evaluation
    after an epoch is not included; one within an epoch is part of ``rest_seconds``.

    Example:
        >>> throughput = strategy.add(Throughput())
        >>> strategy.print(throughput.read())
    """

    def __init__(self) -> None:
        self._samples = 0
        self._seconds = self._data = self._step = 0.0
        self._iterations = 0  # in progress
        self._iterating_since = 0.0
        self._stepping_since: float | None = None
        self._read = Totals()

    def plug_in(self, sockets: Sockets) -> None:
        """Begin to measure."""
        self._communicator = sockets.communicator
        self._copies = sockets.batch_group.size  # of each sample
        of_backend = sockets.backend.devices
        # The script may have put layers of its models on other GPUs than the backend's.
        in_use = [*of_backend, *(device for module in sockets.prepared for device in devices_of(module))]
        self._gpus = [device for device in dict.fromkeys(in_use) if device.type == accelerator()]
        super().plug_in(sockets)

    def totals(self) -> Totals:
        """Return the measurements of this process so far. Not collective; does not synchronise devices."""
        now = perf_counter()
        iterating = now - self._iterating_since if self._iterations else 0.0
        stepping = 0.0 if self._stepping_since is None else now - self._stepping_since
        return Totals(self._samples, self._seconds + iterating, self._data, self._step + stepping)

    def read(self) -> dict[str, float]:
        """Return the measurements since the last call, as a dict for a logger. Collective: one small gather.

        Returns:
            ``samples_per_second`` of all ranks together; ``data_seconds`` (waiting for a loader), ``step_seconds``
            (backward, averaging and optimizer, in host time) and ``rest_seconds`` (everything else in the training
            loop, including the forward), as means over the ranks; ``peak_memory_mb``, the maximum over the ranks since
            their start in MiB: memory allocated on the GPU, or resident memory without one. ``slowest_rank`` is the
            rank that spent the most time outside of its steps, for which the others wait in theirs, and
            ``slowest_ratio`` is its time divided by the median over the ranks.
        """
        if self._iterations:
            self._await_device()
        totals = self.totals()
        since = [now - read for now, read in zip(totals, self._read, strict=True)]
        self._read = totals
        ranks = self._communicator.all_gather(torch.tensor([*since, self._peak_memory()], dtype=torch.float64))
        samples, seconds, memory = ranks[:, 0].sum().item(), ranks[:, 1].max().item(), ranks[:, 4].max().item()
        samples /= self._copies
        _, mean_seconds, data, step, _ = ranks.mean(0).tolist()
        # Within its steps, a rank also waits for the others.
        outside = ranks[:, 1] - ranks[:, 3]
        slowest, median = outside.max(0), outside.median().item()
        return {
            "samples_per_second": samples / seconds if seconds else 0.0,
            "data_seconds": data,
            "step_seconds": step,
            "rest_seconds": mean_seconds - data - step,
            "peak_memory_mb": memory / 2**20,
            "slowest_rank": slowest.indices.item(),
            "slowest_ratio": slowest.values.item() / median if median > 0 else 1.0,
        }

    def batches(self, batches: Batches) -> Batches:
        """Yield from an iterator of training batches, and measure it."""
        since = perf_counter()
        if self._iterations == 0:
            self._iterating_since = since
        self._iterations += 1  # several loaders may be iterated at once, and the time counts once
        try:
            for micro_batch, batch in batches:
                self._data += perf_counter() - since
                self._samples += micro_batch.count
                yield micro_batch, batch
                since = perf_counter()
            self._data += perf_counter() - since
        finally:
            self._iterations -= 1
            if self._iterations == 0:
                self._await_device()  # queued work belongs to the samples counted so far
                self._seconds += perf_counter() - self._iterating_since

    def before_call(self, call: str) -> None:
        """Start the clock of ``backward`` or ``update``."""
        self._stepping_since = perf_counter()

    def after_call(self) -> None:
        """Stop that clock."""
        if self._stepping_since is not None:
            self._step += perf_counter() - self._stepping_since
            self._stepping_since = None

    def _await_device(self) -> None:
        for device in self._gpus:
            torch.accelerator.synchronize(device)

    def _peak_memory(self) -> int:
        """Return the peak memory in bytes."""
        on_gpus = [torch.accelerator.max_memory_allocated(device) for device in self._gpus]
        return max(on_gpus, default=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT)
