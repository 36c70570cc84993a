"""Reads samples with random number generators that are seeded for each sample.

torch's generator is seeded for every sample, which takes 1 µs. Python's and numpy's take 5 µs, longer than reading many
kinds of samples, and most datasets draw from neither. So these are seeded only if samples draw from them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unitrain.rng import seed_generators, seed_numpy, seed_python, seed_torch

# Arbitrary, so that no dataset seeds a generator with it.
_IDLE_SEED = 0x5B2D71E96A0C48F3


class SeededReads:
    """Reads the samples of one dataset in one process, and detects whether they draw from python's or numpy's numbers.

    For the first batch, every generator is seeded for each sample. If its last sample drew from neither of the two,
    these are idle: from then on, they are seeded once per batch, with a constant. If a batch draws from them after all,
    it is read again with a seed for each sample, as are all later ones. So every sample draws its own numbers.
    """

    def __init__(self) -> None:
        self._idle: bool | None = None  # None before the first batch

    def read(self, dataset: Any, samples: Sequence[int], seeds: Sequence[int]) -> list[Any]:
        """Return the samples, each read with generators seeded for it. The generators' states are not restored.

        Args:
            dataset: a map-style dataset, the same in every call.
            samples: its indices to read.
            seeds: a seed for each.
        """
        if self._idle:
            seed_python(_IDLE_SEED)
            seed_numpy(_IDLE_SEED)
            read = _read_each(dataset, samples, seeds, seed_torch)
            if _are_untouched(_IDLE_SEED):
                return read
        read = _read_each(dataset, samples, seeds, seed_generators)
        self._idle = self._idle is None and _are_untouched(seeds[-1])
        return read


def _read_each(
    dataset: Any, samples: Sequence[int], seeds: Sequence[int], seed_for_sample: Callable[[int], None]
) -> list[Any]:
    read = []
    for sample, seed in zip(samples, seeds, strict=True):
        seed_for_sample(seed)
        read.append(dataset[sample])
    return read


def _are_untouched(seed: int) -> bool:
    """Return whether python's and numpy's generator are as they were seeded with ``seed``. Changes their states."""
    drawn = random.random(), np.random.random_sample()
    seed_python(seed)
    seed_numpy(seed)
    return drawn == (random.random(), np.random.random_sample())
