"""``Balance`` divides global batches so that all micro-batches of all ranks cost the same.

By default, rank ``r`` of ``W`` takes every ``W``-th sample of a global batch, whatever they cost, and the slowest rank
sets the pace. Here the samples are known to cost more or less. The global batches stay as they are.

- Samples that are padded to the longest of their micro-batch are sorted by length and cut into consecutive parts. The
  least bound that every part can keep is found by bisection, filling parts from the longest sample on (Pinar and
  Aykanat, "Fast optimal load balancing algorithms for 1D partitioning", J. Parallel Distrib. Comput. 64, 2004).
- Costs that add up go, the largest first, to the part with the least so far (Graham, "Bounds on multiprocessing timing
  anomalies", SIAM J. Appl. Math. 17, 1969).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unitrain.data.order.division import Division
from unitrain.data.order.order import Order
from unitrain.errors import DataError

_EXACT = 1e-3  # the bound is at most so much larger than it need be, in proportion


@dataclass(frozen=True)
class Balance(Division):
    """Divides by the costs of samples, and by how the cost of a micro-batch follows from them."""

    costs: Callable[[Any], NDArray[np.float64]]
    """Returns the costs of samples: by index or, in a plan, by position; in a stream, of the samples themselves."""
    padded: bool
    """Whether a micro-batch costs its size times its longest sample, and not the sum."""
    most: float | None = None
    """The most that a micro-batch of a rank with a share of 1 may cost; None for a given number of micro-batches."""
    digest: str = ""
    """A digest of the costs of a map-style dataset's samples."""

    @property
    def limit(self) -> str:
        """``max_cost``, if it is given."""
        return "" if self.most is None else f"max_cost={self.most}"

    @property
    def facts(self) -> Mapping[str, Any]:
        """The arguments, which must be the same on all ranks."""
        return {"a digest of the lengths or costs of samples": self.digest, "max_cost": self.most}

    def in_epoch(self, order: Order) -> Balance:
        """Look up the costs of positions in an order."""
        return replace(self, costs=lambda positions: self.costs(order.take(positions)))

    def check(self, costs: NDArray[np.float64], first: int = 0) -> None:
        """Raise DataError unless the samples from number ``first`` on can have these costs."""
        if not (np.isfinite(costs) & (costs > 0)).all():
            name = "lengths" if self.padded else "costs"
            raise DataError(f"{name} must be positive numbers, but go from {costs.min()} to {costs.max()}.")
        if self.most is not None and costs.max(initial=0) > self.most:
            raise DataError(
                f"sample {first + costs.argmax()} costs {costs.max():g}, which is more than max_cost={self.most:g} for "
                "a whole batch: raise max_cost, or leave out such samples."
            )

    def parts(self, samples: Any, first: int, cuts: int, shares: Sequence[int]) -> list[list[NDArray[np.int64]]]:
        """Return the positions of each rank in each micro-batch of a window of samples, from position ``first`` on.

        The ranks' parts cost the same in proportion to their ``shares``. There are ``cuts`` micro-batches, unless
        ``most`` decides.
        """
        costs = self.costs(samples)
        self.check(costs, first)
        # Stable, so that all ranks sort equal costs alike, whatever numpy they have.
        falling = np.argsort(-costs, kind="stable")
        owners = self._owners(costs[falling], cuts, shares)
        sizes = np.bincount(owners, minlength=len(shares))
        parts = np.split(falling[np.argsort(owners, kind="stable")], np.cumsum(sizes)[:-1])
        # Each rank needs a part in the last micro-batch, an empty one if the samples run out.
        parts += [falling[:0]] * (-len(parts) % len(shares))
        # Within a part, samples keep the order of the epoch.
        positions = [first + np.sort(part) for part in parts]
        return [positions[begin : begin + len(shares)] for begin in range(0, len(parts), len(shares))]

    def _owners(self, costs: NDArray[np.float64], cuts: int, shares: Sequence[int]) -> NDArray[np.int64]:
        """Return the part of each sample, given their falling costs."""
        split = _split_padded if self.padded else _split_sums
        if self.most is None:
            owners = split(costs, list(shares) * cuts, np.inf)
            assert owners is not None  # without a bound, any split will do
            return owners
        least = int(costs.sum() / (self.most * sum(shares)))  # parts can't be filled better than that
        tries = (split(costs, list(shares) * number, self.most) for number in count(max(1, least)))
        return next(owners for owners in tries if owners is not None)


def costs_by(function: Callable[[Any], float], samples: Iterable[Any]) -> NDArray[np.float64]:
    """Return the cost of each sample, as a function of the script gives it."""
    return np.fromiter(map(function, samples), np.float64)


def _split_padded(lengths: NDArray[np.float64], shares: Sequence[int], most: float) -> NDArray[np.int64] | None:
    """Return the part of each sample, given falling lengths; None if one would cost more than ``most``."""
    samples, parts = len(lengths), len(shares)

    def filled(bound: float) -> list[int] | None:
        """Return the sizes of parts that cost at most ``bound``; None if samples are left."""
        sizes, begin = [], 0
        for part, share in enumerate(shares):
            if begin == samples:
                break
            fit = int(bound * share / lengths[begin])
            if not fit:
                return None
            sizes.append(min(fit, max(samples - begin - (parts - 1 - part), 1)))  # each other part needs a sample
            begin += sizes[-1]
        return sizes if begin == samples else None

    low, high = 0.0, min(most, 1.001 * lengths[0] * -(-samples // parts))  # enough for parts of one size
    best = filled(high)
    if best is None:
        return None
    while high - low > _EXACT * high:
        bound = (low + high) / 2
        sizes = filled(bound)
        low, high, best = (bound, high, best) if sizes is None else (low, bound, sizes)
    return np.repeat(np.arange(len(best)), best)


def _split_sums(costs: NDArray[np.float64], shares: Sequence[int], most: float) -> NDArray[np.int64] | None:
    """Return the part of each sample, given falling costs; None if the sum of one would be more than ``most``."""
    loads = [(0.0, part) for part in range(len(shares))]
    owners = np.empty(len(costs), np.int64)
    for sample, cost in enumerate(costs.tolist()):
        load, part = loads[0]
        owners[sample] = part
        heapq.heapreplace(loads, (load + cost / shares[part], part))
    return owners if max(loads)[0] <= most else None
