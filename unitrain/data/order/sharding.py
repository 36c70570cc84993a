"""Sharding: which positions of an epoch's order each rank trains on in each step, as pure arithmetic.

An epoch is an order of all samples. Step ``s`` takes its positions ``s·G`` to ``(s+1)·G``, whatever the number of
processes. These are split into ``accumulate`` micro-batches, and each rank takes its ``Part`` of the positions of a
micro-batch: with equal shares, rank ``r`` of ``W`` takes every ``W``-th, starting with its ``r``-th. No sample is
padded, repeated or left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate as running_sums
from itertools import pairwise

from unitrain.data.order.shares import Part, part_of


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch, as one rank sees it."""

    start: int
    """First position of the micro-batch in the epoch's order."""
    stop: int
    """One past its last position."""
    count: int
    """Number of samples of this rank in it; 0 if its batch is a stand-in."""
    window: int
    """Number of samples in its accumulation window, over all ranks."""
    step: int
    """Index of its window in the epoch."""
    first: bool
    """Whether it is the first of its window."""
    last: bool
    """Whether it is the last of its window."""
    opening: bool
    """Whether it is the first of an iteration over a loader."""
    everywhere: bool
    """Whether every rank is known to have samples in it."""


class _OfRank:
    """The part of a plan that depends on the rank."""

    rank: int
    world_size: int
    shares: tuple[int, ...]
    """The shares of all ranks, without a common divisor; empty if all are equal."""

    @cached_property
    def part(self) -> Part:
        """This rank's part of every micro-batch."""
        return part_of(self.rank, self.shares or (1,) * self.world_size)


@dataclass(frozen=True)
class EpochPlan(_OfRank):
    """Splits an epoch of ``samples`` into optimizer steps of ``global_batch`` samples over all processes."""

    samples: int
    global_batch: int
    accumulate: int
    rank: int
    world_size: int
    drop_last: bool
    start: int = 0
    """Number of positions that were consumed before. Only the rest is planned."""
    shares: tuple[int, ...] = ()

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        full, rest = divmod(self.samples - self.start, self.global_batch)
        return full + (1 if rest and not self.drop_last else 0)

    @property
    def end(self) -> int:
        """One past the last position that is read."""
        return min(self.samples, self.start + self.steps * self.global_batch)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches, the same on every rank."""
        full, rest = divmod(self.samples - self.start, self.global_batch)
        if not rest or self.drop_last:
            return full * self.accumulate
        return full * self.accumulate + sum(start < rest for start in self.edges()[:-1])

    def can_start_at(self, start: int) -> bool:
        """Return whether the rest of the epoch can be planned from this position."""
        return 0 <= start <= self.samples

    def edges(self) -> list[int]:
        """Return the boundaries of the micro-batches in a full window."""
        return [i * self.global_batch // self.accumulate for i in range(self.accumulate + 1)]

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches in order."""
        edges = self.edges()
        done = self.start // self.global_batch
        for i in range(self.steps):
            first = self.start + i * self.global_batch
            window = min(self.global_batch, self.samples - first)
            yield from cut(first, window, edges, done + i, i == 0, self.part)


@dataclass(frozen=True)
class BatchPlan(_OfRank):
    """Splits an epoch of given global batches: each is one optimizer step over all processes."""

    sizes: Sequence[int]
    """Number of samples in each."""
    accumulate: int
    rank: int
    world_size: int
    start: int = 0
    """As in ``EpochPlan``; must be the end of a batch."""
    shares: tuple[int, ...] = ()

    @property
    def samples(self) -> int:
        """Number of samples in the whole epoch."""
        return sum(self.sizes)

    @property
    def end(self) -> int:
        """One past the last position that is read."""
        return self.samples

    def can_start_at(self, start: int) -> bool:
        """Return whether the rest of the epoch can be planned from this position: only at the end of a batch."""
        return start in running_sums(self.sizes, initial=0)

    def _windows(self) -> Iterator[tuple[int, int, int]]:
        edges = pairwise(running_sums(self.sizes, initial=0))
        return ((i, start, stop - start) for i, (start, stop) in enumerate(edges) if start >= self.start)

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return sum(1 for _ in self._windows())

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches, the same on every rank."""
        return sum(min(size, self.accumulate) for _, _, size in self._windows())

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches in order."""
        for i, first, size in self._windows():
            cuts = min(size, self.accumulate)
            edges = [part * size // cuts for part in range(cuts + 1)]
            yield from cut(first, size, edges, i, first == self.start, self.part)


def cut(first: int, window: int, edges: Sequence[int], step: int, opening: bool, part: Part) -> Iterator[MicroBatch]:
    """Yield a rank's micro-batches of a window: the ``window`` positions from ``first`` on, split at ``edges``."""
    for start, stop in pairwise(edges):
        if start >= window:
            break
        begin, end = first + start, first + min(stop, window)
        yield MicroBatch(
            begin, end, part.count(end - begin), window, step, start == 0, end - first == window,
            opening=opening and start == 0, everywhere=end - begin >= part.enough,
        )  # fmt: skip
