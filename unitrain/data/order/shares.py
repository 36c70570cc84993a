"""Shares: which positions of a micro-batch each rank takes, in proportion to its share, as pure arithmetic.

The positions are dealt out in a pattern as long as the sum of the shares, which repeats: with shares 2, 1, 1, ranks 0,
1, 0 and 2 take one position each, and so on. Of the first ``n`` positions, each rank has its exact proportion, rounded
up or down, so a micro-batch may have any size. With equal shares, rank ``r`` of ``W`` takes every ``W``-th position.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Part:
    """The positions that one rank takes of a micro-batch: these offsets from its start, in every period."""

    period: int
    offsets: tuple[int, ...]
    enough: int
    """Size from which on a micro-batch has a position for every rank."""

    def count(self, size: int) -> int:
        """Return how many positions of a micro-batch of ``size`` samples are the rank's."""
        periods, rest = divmod(size, self.period)
        return periods * len(self.offsets) + bisect_left(self.offsets, rest)

    def positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the rank's positions of the micro-batch from ``start`` to ``stop`` (exclusive), ascending."""
        if len(self.offsets) == 1:  # equal shares, the usual case
            return np.arange(start + self.offsets[0], stop, self.period)
        periods, nth = np.divmod(np.arange(self.count(stop - start)), len(self.offsets))
        positions: NDArray[np.int64] = start + periods * self.period + np.array(self.offsets)[nth]
        return positions


def reduced(shares: Sequence[int]) -> tuple[int, ...]:
    """Return the shares of all ranks divided by their greatest common divisor."""
    # So that the shares 4, 2, 2 deal out the same positions as 2, 1, 1.
    divisor = gcd(*shares)
    return tuple(share // divisor for share in shares)


@lru_cache(maxsize=16)
def part_of(rank: int, shares: tuple[int, ...]) -> Part:
    """Return the part of a rank, for shares without a common divisor."""
    pattern = owners(shares)
    # Where each rank occurs first: once the last of them has, every rank has a position.
    _, first = np.unique(pattern, return_index=True)
    return Part(len(pattern), tuple(np.flatnonzero(pattern == rank).tolist()), 1 + int(first.max()))


@lru_cache(maxsize=16)
def owners(shares: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the pattern: which rank has each position of a micro-batch, up to the sum of the shares.

    The i-th of a rank's positions must lie between those where its exact proportion exceeds i and where it has reached
    i + 1. Earliest deadline first meets all deadlines (Baruah et al., "Proportionate progress: a notion of fairness in
    resource allocation", Algorithmica 15, 1996).
    """
    period = sum(shares)
    windows = sorted(
        (i * period // share, -(-(i + 1) * period // share), rank)
        for rank, share in enumerate(shares)
        for i in range(share)
    )
    open_windows: list[tuple[int, int]] = []  # deadline and rank, a heap
    pattern = np.empty(period, np.int64)
    begun = 0
    for position in range(period):
        while begun < period and windows[begun][0] <= position:
            heapq.heappush(open_windows, windows[begun][1:])
            begun += 1
        pattern[position] = heapq.heappop(open_windows)[1]
    pattern.flags.writeable = False  # it is cached
    return pattern
