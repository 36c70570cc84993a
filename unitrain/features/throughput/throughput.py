"""Throughput of training and where its time goes. Costs nothing unless a script asks for it."""

from __future__ import annotations

import resource
import sys
from time import perf_counter

import torch

from unitrain.data.loop import Batches
from unitrain.device import accelerator
from unitrain.training.feature import Feature
from unitrain.training.loop.sockets import Sockets

_UNIT = 1 if sys.platform == "darwin" else 1024  # of the peak that the system tells, in bytes


class Throughput(Feature):
    """Measures samples per second, time and peak memory over all ranks, from the moment when it is added to a run.

    Samples are counted, and time is measured, while a loader of the strategy is iterated for training. An evaluation
    after an epoch is not included; one within an epoch is part of ``rest_seconds``.

    Example:
        >>> throughput = strategy.add(Throughput())
        >>> strategy.print(throughput.read())
    """

    def __init__(self) -> None:
        # Since the last reading.
        self._samples = 0  # that the loaders of this process have yielded for training
        self._seconds = 0.0  # in iterations over these loaders
        self._data = 0.0  # of it, waiting for a batch
        self._step = 0.0  # of it, in ``step``, ``backward`` and ``update``, including waits for other ranks
        self._iterations = 0  # in progress
        self._counted_at = self._stepping_since = 0.0

    def plug_in(self, sockets: Sockets) -> None:
        """Begin to measure."""
        self._communicator = sockets.communicator
        self._copies = sockets.batch_group.size  # of each sample
        self._gpus = [device for device in sockets.backend.devices if device.type == accelerator()]
        super().plug_in(sockets)

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
            self._count_time()
        measured = [self._samples, self._seconds, self._data, self._step, self._peak_memory()]
        self._samples, self._seconds, self._data, self._step = 0, 0.0, 0.0, 0.0
        ranks = self._communicator.all_gather(torch.tensor(measured, dtype=torch.float64))
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
            self._counted_at = since
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
                self._count_time()

    def before_call(self, call: str) -> None:
        """Start the clock of ``backward`` or ``update``."""
        self._stepping_since = perf_counter()

    def after_call(self) -> None:
        """Stop that clock."""
        self._step += perf_counter() - self._stepping_since

    def _count_time(self) -> None:
        """Count the time since iterations began, or it was counted last."""
        for device in self._gpus:
            torch.accelerator.synchronize(device)  # queued work belongs to the samples counted so far
        now = perf_counter()
        self._seconds += now - self._counted_at
        self._counted_at = now

    def _peak_memory(self) -> int:
        """Return the peak memory in bytes."""
        on_gpus = [torch.accelerator.max_memory_allocated(device) for device in self._gpus]
        return max(on_gpus, default=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT)
