"""Which samples of an epoch a rank trains on, and when: pure arithmetic, the same on every rank.

An epoch is one order of all samples. Step ``s`` takes positions ``s·G`` to ``(s+1)·G`` of it, whatever the number of
processes; the step's positions are cut into ``accumulate`` micro-batches, and rank ``r`` of ``W`` takes every ``W``-th
position of a micro-batch from its ``r``-th on. No sample is padded, repeated or left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch, as one rank sees it."""

    start: int
    """First position of the micro-batch in the epoch's order."""
    stop: int
    """One past its last position."""
    count: int
    """Samples that this rank gets of it."""
    window: int
    """Samples of its whole accumulation window, over all ranks."""
    step: int
    """Number of its window in the epoch."""
    first: bool
    """Whether it begins its window."""
    last: bool
    """Whether it ends its window."""


@dataclass(frozen=True)
class EpochPlan:
    """How an epoch of ``samples`` is cut. ``global_batch`` samples make one optimizer step over all processes."""

    samples: int
    global_batch: int
    accumulate: int
    rank: int
    world_size: int
    drop_last: bool

    @property
    def steps(self) -> int:
        """Optimizer steps in an epoch."""
        full, rest = divmod(self.samples, self.global_batch)
        return full + (1 if rest and not self.drop_last else 0)

    @property
    def micro_batches(self) -> int:
        """Micro-batches in an epoch: the same number on every rank."""
        full, rest = divmod(self.samples, self.global_batch)
        if not rest or self.drop_last:
            return full * self.accumulate
        return full * self.accumulate + sum(start < rest for start in self._edges()[:-1])

    def _edges(self) -> list[int]:
        return [i * self.global_batch // self.accumulate for i in range(self.accumulate + 1)]

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches in order."""
        edges = self._edges()
        for step in range(self.steps):
            first = step * self.global_batch
            window = min(self.global_batch, self.samples - first)
            for start, stop in pairwise(edges):
                if start >= window:
                    break
                begin, end = first + start, first + min(stop, window)
                count = len(range(begin + self.rank, end, self.world_size))
                yield MicroBatch(begin, end, count, window, step, first=start == 0, last=end - first == window)


def shuffled(samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of an epoch: a permutation of ``range(samples)`` that depends on nothing but its arguments."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(samples)
