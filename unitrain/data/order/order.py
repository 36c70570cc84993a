"""The order of an epoch: a shuffle of ``range(n)`` computed element by element, without storing the permutation.

It depends only on seed and epoch. Tests compare it with golden vectors, so that it is the same with any version of
numpy, torch and UniTrain.

- Fewer than 65,536 samples are sorted by random keys from SplitMix64 (see ``unitrain.rng.mixed``): an exact shuffle,
  since the keys are distinct.
- For more, a Feistel network (Luby, Rackoff, "How to construct pseudorandom permutations from pseudorandom functions",
  SIAM J. Comput. 17, 1988) permutes the integers below the next power of two, and values outside ``range(n)`` are
  permuted again until they are inside (cycle walking: Black, Rogaway, "Ciphers with arbitrary finite domains", CT-RSA
  2002). Eight rounds, since four fail tests of uniformity. It is not meant for cryptography.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from unitrain.rng import MULTIPLIERS, mixed

_EXACT_BELOW = 2**16
_ROUNDS = 8


class Order(Protocol):
    """The order of the samples in an epoch."""

    def take(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at these positions.

        Args:
            positions: in the epoch, each from 0 to the number of samples minus 1; in any order, and with repetitions.

        Returns:
            Indices of the dataset, one for each position.
        """


class Shuffled:
    """A shuffled ``range(samples)``, different in each epoch.

    Args:
        samples: number of samples, at most 2**62.
        seed: of the run.
        epoch: number of the epoch.
    """

    def __init__(self, samples: int, seed: int, epoch: int) -> None:
        self._samples = samples
        digest = hashlib.blake2b(f"unitrain order {seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        # Read as little-endian whatever the machine, so that all have one order.
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        bits = (samples - 1).bit_length()
        self._low_bits = bits // 2
        self._high_bits = bits - self._low_bits

    def take(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at these positions of the order."""
        if len(positions) and not 0 <= positions.min() <= positions.max() < self._samples:
            raise IndexError(f"positions must be from 0 to {self._samples - 1}")
        if self._samples < _EXACT_BELOW:
            return self._sorted[positions]
        return self._walk(positions.astype(np.uint64)).astype(np.int64)

    def _walk(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Permute the integers below the power of two until every value is in ``range(samples)``."""
        limit = np.uint64(self._samples)
        values = self._permute(values)
        outside = np.flatnonzero(values >= limit)
        while len(outside):  # less than half of the integers are outside, so a value takes 2 rounds on average at most
            again = self._permute(values[outside])
            values[outside] = again
            outside = outside[again >= limit]
        return values

    def _permute(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Apply the rounds, which mask the two halves in turn. With an odd number of bits, they differ in width."""
        high = values >> np.uint64(self._low_bits)
        low = values & np.uint64((1 << self._low_bits) - 1)
        # In place: allocating each intermediate array would take longer than computing it.
        mask, scratch = np.empty_like(values), np.empty_like(values)
        for number, key in enumerate(self._keys):
            source, target, width = (high, low, self._low_bits) if number % 2 else (low, high, self._high_bits)
            np.add(source, key, out=mask)
            np.multiply(mask, MULTIPLIERS[0], out=mask)
            np.right_shift(mask, np.uint64(32), out=scratch)
            np.bitwise_xor(mask, scratch, out=mask)
            np.multiply(mask, MULTIPLIERS[1], out=mask)
            np.right_shift(mask, np.uint64(64 - width), out=mask)
            np.bitwise_xor(target, mask, out=target)
        permuted: NDArray[np.uint64] = (high << np.uint64(self._low_bits)) | low
        return permuted

    @cached_property
    def _sorted(self) -> NDArray[np.int64]:
        """The samples, sorted by random keys. Half a MiB at most, kept for the epoch."""
        return np.argsort(mixed(np.arange(self._samples), int(self._keys[0])))


class InOrder:
    """The samples in the order of the dataset."""

    def take(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at these positions."""
        return positions
