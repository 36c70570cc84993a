"""``BalancedBatches`` divides global batches so that the padded micro-batches of all ranks cost the same.

By default, rank ``r`` of ``W`` takes every ``W``-th sample of a global batch, whatever its length, and the slowest rank
sets the pace. Here the samples are sorted by length and cut into consecutive parts. The least bound that every part can
keep is found by bisection, filling parts from the longest sample on (Pinar and Aykanat, "Fast optimal load balancing
algorithms for 1D partitioning", J. Parallel Distrib. Comput. 64, 2004). The global batches stay as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unitrain.data.order.division import Division
from unitrain.data.order.order import Order
from unitrain.errors import ConfigError, DataError

_EXACT = 1e-3  # the bound is at most so much larger than it need be, in proportion


class BalancedBatches:
    """Divides each global batch so that the micro-batches of all ranks, padded to their longest sample, cost the same.

    Args:
        lengths: the length of each sample, or a function of its index. For an iterable dataset that every rank reads as
            a whole, a function of the sample.
        max_cost: the most that a batch of one process may cost, instead of ``accumulate``: its size times its longest
            sample.

    Example:
        >>> by_length = BalancedBatches(lengths=[len(text) for text in texts])
        >>> train = strategy.dataloader(texts, global_batch_size=256, shuffle=True, batching=by_length)
    """

    def __init__(self, *, lengths: Sequence[float] | Callable[[Any], float], max_cost: float | None = None) -> None:
        self._lengths = lengths
        self._max_cost = max_cost

    def division(self, dataset: Any, *, is_stream: bool) -> Balance:
        """Return the division of a dataset.

        Raises:
            ConfigError: the lengths are not for a stream.
            DataError: they are not those of the dataset's samples.
        """
        lengths: Any = self._lengths
        if is_stream:
            if not callable(lengths):
                raise ConfigError("lengths of an iterable dataset must be a function of a sample, such as lengths=len.")
            return Balance(partial(_lengths_by, lengths), self._max_cost)
        samples = len(dataset)
        values = _lengths_by(lengths, range(samples)) if callable(lengths) else np.asarray(lengths, float)
        if values.shape != (samples,):
            raise DataError(
                f"lengths must have a number for each of the {samples} samples, but has shape {list(values.shape)}."
            )
        # The ranks compare it, since each divides the global batches by itself.
        digest = hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()
        balance = Balance(values.__getitem__, self._max_cost, digest)
        # Now, and not when the first epoch comes to the sample: all lengths are known.
        balance.check(values)
        return balance


@dataclass(frozen=True)
class Balance(Division):
    """Divides by the lengths of samples."""

    lengths: Callable[[Any], NDArray[np.float64]]
    """Returns the lengths of samples: by index or, in a plan, by position; in a stream, of the samples themselves."""
    most: float | None = None
    """The most that a micro-batch of a rank with a share of 1 may cost; None for a given number of micro-batches."""
    digest: str = ""
    """A digest of the lengths of a map-style dataset's samples."""

    @property
    def limit(self) -> str:
        """``max_cost``, if it is given."""
        return "" if self.most is None else f"max_cost={self.most}"

    @property
    def facts(self) -> Mapping[str, Any]:
        """The arguments, which must be the same on all ranks."""
        return {"a digest of the lengths of samples": self.digest, "max_cost": self.most}

    def in_epoch(self, order: Order) -> Balance:
        """Look up the lengths of positions in an order."""
        return replace(self, lengths=lambda positions: self.lengths(order.take(positions)))

    def check(self, lengths: NDArray[np.float64], first: int = 0) -> None:
        """Raise DataError unless the samples from number ``first`` on can have these lengths."""
        if not (np.isfinite(lengths) & (lengths > 0)).all():
            raise DataError(f"lengths must be positive numbers, but go from {lengths.min()} to {lengths.max()}.")
        if self.most is not None and lengths.max(initial=0) > self.most:
            raise DataError(
                f"sample {first + lengths.argmax()} costs {lengths.max():g}, which is more than max_cost={self.most:g} "
                "for a whole batch: raise max_cost, or leave out such samples."
            )

    def parts(self, samples: Any, first: int, cuts: int, shares: Sequence[int]) -> list[list[NDArray[np.int64]]]:
        """Return the positions of each rank in each micro-batch of a window of samples, from position ``first`` on.

        The ranks' parts cost the same in proportion to their ``shares``. There are ``cuts`` micro-batches, unless
        ``most`` decides.
        """
        lengths = self.lengths(samples)
        self.check(lengths, first)
        # Stable, so that all ranks sort equal lengths alike, whatever numpy they have.
        falling = np.argsort(-lengths, kind="stable")
        parts = np.split(falling, np.cumsum(self._sizes(lengths[falling], cuts, shares))[:-1])
        # Each rank needs a part in the last micro-batch, an empty one if the samples run out.
        parts += [falling[:0]] * (-len(parts) % len(shares))
        # Within a part, samples keep the order of the epoch.
        positions = [first + np.sort(part) for part in parts]
        return [positions[begin : begin + len(shares)] for begin in range(0, len(parts), len(shares))]

    def _sizes(self, lengths: NDArray[np.float64], cuts: int, shares: Sequence[int]) -> list[int]:
        """Return the sizes of the parts, given falling lengths."""
        if self.most is None:
            sizes = _split(lengths, list(shares) * cuts, np.inf)
            assert sizes is not None  # without a bound, any split will do
            return sizes
        least = int(lengths.sum() / (self.most * sum(shares)))  # parts can't be filled better than that
        tries = (_split(lengths, list(shares) * number, self.most) for number in count(max(1, least)))
        return next(sizes for sizes in tries if sizes is not None)


def _lengths_by(function: Callable[[Any], float], samples: Iterable[Any]) -> NDArray[np.float64]:
    """Return the length of each sample, as a function of the script gives it."""
    return np.fromiter(map(function, samples), np.float64)


def _split(lengths: NDArray[np.float64], shares: Sequence[int], most: float) -> list[int] | None:
    """Return the sizes of consecutive parts, given falling lengths; None if one would cost more than ``most``."""
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
    return best
