"""Reads samples with random number generators that are seeded for each sample.

torch's generator is seeded for every sample, which takes 1 µs. Python's and numpy's take 6 µs, longer than reading many
kinds of samples, and most datasets draw from neither. So these are seeded only if samples draw from them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from unitrain.rng import seed_numpy, seed_python, seed_torch


class SeededReads:
    """Reads the samples of one dataset in one process, and detects which generators they draw from.

    For the first batch, every generator is seeded for each sample. A generator that its last sample did not draw from
    is idle: from then on, it is seeded once per batch, with a constant. If a batch draws from it after all, the batch
    is read again with a seed for each sample, as are all later ones. So every sample draws its own numbers.
    """

    def __init__(self) -> None:
        # By name: a bound method would be pickled for a worker with a copy of this process's generator.
        self._idle: list[str] | None = None

    def read(self, dataset: Any, samples: Sequence[int], seeds: Sequence[int]) -> list[Any]:
        """Return the samples, each read with generators seeded for it. The generators' states are not restored.

        Args:
            dataset: a map-style dataset, the same in every call.
            samples: its indices to read.
            seeds: a seed for each.
        """
        while True:  # twice at most for each generator, when a dataset begins to draw from it
            idle = {name: _GENERATORS[name] for name in self._idle or ()}
            for generator in idle.values():
                generator.seed(_IDLE_SEED)
            drawn_from = [_GENERATORS[name].seed for name in _GENERATORS if name not in idle]
            read = []
            for sample, seed in zip(samples, seeds, strict=True):
                for seed_generator in drawn_from:
                    seed_generator(seed)
                seed_torch(seed)
                read.append(dataset[sample])
            if self._idle is None:
                self._idle = [name for name, generator in _GENERATORS.items() if generator.is_untouched(seeds[-1])]
                return read
            self._idle = [name for name, generator in idle.items() if generator.is_untouched(_IDLE_SEED)]
            if len(self._idle) == len(idle):
                return read


class _Generator(NamedTuple):
    seed: Callable[[int], None]
    draw: Callable[[], float]

    def is_untouched(self, seed: int) -> bool:
        """Return whether no number was drawn since the generator was seeded with ``seed``. Changes its state."""
        drawn = self.draw()
        self.seed(seed)
        return drawn == self.draw()


_GENERATORS = {
    "python": _Generator(seed_python, random.random),
    "numpy": _Generator(seed_numpy, np.random.random_sample),
}
# Arbitrary, so that no dataset seeds a generator with it.
_IDLE_SEED = 0x5B2D71E96A0C48F3
