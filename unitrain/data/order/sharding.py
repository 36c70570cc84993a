"""Sharding: which positions of an epoch's order each rank trains on in each step, as pure arithmetic.

An epoch is an order of all samples. Step ``s`` takes its positions ``s·G`` to ``(s+1)·G``, whatever the number of
processes. These are split into ``accumulate`` micro-batches, and each rank takes its ``Part`` of the positions of a
micro-batch: with equal shares, rank ``r`` of ``W`` takes every ``W``-th, starting with its ``r``-th. If samples are
given a ``Division``, it decides instead; see ``division.py``. No sample is padded, repeated or left out.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate as running_sums
from itertools import pairwise
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unitrain.data.order.division import Division
from unitrain.data.order.shares import Part, part_of


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch, as one rank sees it."""

    start: int
    """First position of the micro-batch in the epoch's order."""
    stop: int
    """Position after its last one."""
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
    chosen: NDArray[np.int64] | None = field(default=None, compare=False)
    """This rank's positions, if a division has chosen them: ``start`` and ``stop`` only count then."""

    def positions(self, part: Part) -> NDArray[np.int64]:
        """Return this rank's positions in the epoch's order; of a stand-in, the position of another rank's sample.

        Args:
            part: this rank's part of every micro-batch.
        """
        if not self.count:
            return np.array([self.start])
        return part.positions(self.start, self.stop) if self.chosen is None else self.chosen


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Base class of the plans. Iterating yields this rank's micro-batches of an epoch in order.

    All is arithmetic on the plan's fields, so that every rank knows the micro-batches of all, without communication.
    """

    accumulate: int
    """Number of micro-batches in a step, if it has enough samples."""
    rank: int
    world_size: int
    start: int = 0
    """Number of positions that were consumed before. Only the rest is planned."""
    shares: tuple[int, ...] = ()
    """The shares of all ranks, without a common divisor; empty if all are equal."""
    division: Division | None = None
    """Divides the samples at some positions; None if only their number counts."""

    @cached_property
    def part(self) -> Part:
        """This rank's part of every micro-batch."""
        return part_of(self.rank, self._shares)

    @property
    def _shares(self) -> tuple[int, ...]:
        return self.shares or (1,) * self.world_size

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return sum(1 for _ in self._windows())

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches, the same on every rank."""
        if self.division is not None and self.division.limit:
            return sum(1 for _ in self)  # the division decides, window by window
        return sum(self._cuts(size, edges) for _, _, size, edges in self._windows())

    def _cuts(self, size: int, edges: Sequence[int]) -> int:
        """Return the number of micro-batches in a window, unless the division limits them."""
        cuts = sum(edge < size for edge in edges[:-1])
        return cuts if self.division is None else min(cuts, -(-size // self.world_size))  # each needs a sample

    @abstractmethod
    def _windows(self) -> Iterator[tuple[int, int, int, Sequence[int]]]:
        """Yield the step, the first position, the size, and the edges of the micro-batches of each window."""

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches in order."""
        for step, first, size, edges in self._windows():
            yield from self.window(first, np.arange(first, first + size), edges, step, first == self.start)

    def window(self, first: int, samples: Any, edges: Sequence[int], step: int, opening: bool) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of a window of samples, from position ``first`` on.

        They are split at ``edges``, or by the division.

        Args:
            first: position of the window's first sample.
            samples: the positions in the window, or, in a stream, the samples themselves.
            edges: offsets from ``first`` at which micro-batches begin, and the end.
            step: index of the window in the epoch.
            opening: whether it is the first of an iteration.
        """
        size, part = len(samples), self.part
        # For each: its size, how many samples are this rank's, whether every rank has some, and this rank's positions.
        pieces: list[tuple[int, int, bool, NDArray[np.int64] | None]]
        if self.division is None:
            # The last window of an epoch may end before the last edges.
            sizes = [min(stop, size) - start for start, stop in pairwise(edges) if start < size]
            pieces = [(length, part.count(length), length >= part.enough, None) for length in sizes]
        else:
            parts = self.division.parts(samples, first, self._cuts(size, edges), self._shares)
            pieces = [
                (sum(map(len, of_ranks)), len(of_ranks[self.rank]), all(map(len, of_ranks)), of_ranks[self.rank])
                for of_ranks in parts
            ]
        # Every rank makes the same number of micro-batches, since each backward that ends a window is collective.
        for number, (length, count, everywhere, chosen) in enumerate(pieces):
            yield MicroBatch(
                first, first + length, count, size, step, first=not number, last=number == len(pieces) - 1,
                opening=opening and not number, everywhere=everywhere, chosen=chosen,
            )  # fmt: skip
            first += length


@dataclass(frozen=True, kw_only=True)
class EpochPlan(_Plan):
    """Splits an epoch of ``samples`` into optimizer steps of ``global_batch`` samples over all processes.

    The last step has the rest, unless ``drop_last``. With ``start``, a resumed epoch, the steps begin there: the first
    of them may begin in the middle of a step of before, if the global batch has changed.
    """

    samples: int
    global_batch: int
    drop_last: bool = False

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
        """Number of micro-batches, the same on every rank. By division, since an epoch may have millions."""
        full, rest = divmod(self.samples - self.start, self.global_batch)
        if self.division is not None and self.division.limit:
            return super().micro_batches
        in_rest = 0 if self.drop_last else self._cuts(rest, self.edges())
        return full * self._cuts(self.global_batch, self.edges()) + in_rest

    def can_start_at(self, start: int) -> bool:
        """Return whether the rest of the epoch can be planned from this position."""
        return 0 <= start <= self.samples

    def edges(self) -> list[int]:
        """Return the boundaries of the micro-batches in a full window."""
        # In integers: sizes then differ by at most one, and add up to the global batch.
        return [i * self.global_batch // self.accumulate for i in range(self.accumulate + 1)]

    def _windows(self) -> Iterator[tuple[int, int, int, Sequence[int]]]:
        edges, done = self.edges(), self.start // self.global_batch
        # Steps are counted from the epoch's beginning, also where a resumed run continues within it.
        for i in range(self.steps):
            first = self.start + i * self.global_batch
            yield done + i, first, min(self.global_batch, self.samples - first), edges


@dataclass(frozen=True, kw_only=True)
class BatchPlan(_Plan):
    """Splits an epoch of given global batches: each is one optimizer step over all processes.

    A batch with fewer samples than ``accumulate`` has as many micro-batches as samples. ``start`` is a batch's end.
    """

    global_batch: ClassVar[None] = None
    """As in ``EpochPlan``, but each batch has another size."""
    sizes: Sequence[int] = ()
    """Number of samples in each; none until a batch sampler has drawn them."""

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

    def _windows(self) -> Iterator[tuple[int, int, int, Sequence[int]]]:
        for step, (first, stop) in enumerate(pairwise(running_sums(self.sizes, initial=0))):
            if first >= self.start:
                size, cuts = stop - first, min(stop - first, self.accumulate)
                yield step, first, size, [part * size // cuts for part in range(cuts + 1)]


Plan: TypeAlias = EpochPlan | BatchPlan
