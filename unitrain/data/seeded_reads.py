"""Reading samples with random numbers of their own: seeding, for each, the generators that it draws from.

torch's generator is seeded for every sample, which takes 1 µs. Python's and numpy's take 6 µs, more than many samples
take to be read, and most datasets draw from neither: so they are seeded only where samples draw from them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from unitrain.rng import seed_numpy, seed_python, seed_torch


class SeededReads:
    """Reads the samples of one dataset in one process, and learns which generators they draw from.

    In the first batch all are seeded for each sample, and looked at after it. One that no sample has drawn from is from
    then on seeded once for a batch, always alike. If the batch turns out to have drawn from it, the batch is read again
    with seeds for each sample, as all are from then on. So no sample draws what is not its own.
    """

    def __init__(self) -> None:
        # By name: a bound method of the process's generator would reach a worker with a copy of it.
        self._idle: list[str] | None = None

    def read(self, dataset: Any, samples: Sequence[int], seeds: Sequence[int]) -> list[Any]:
        """Return the samples, each read with generators of its own seed."""
        if self._idle is None:
            return self._first_batch(dataset, samples, seeds)
        while True:
            idle = {name: _GENERATORS[name] for name in self._idle}
            for generator in idle.values():
                generator.seed(_IDLE_SEED)
            drawn_from = [_GENERATORS[name].seed for name in _GENERATORS if name not in idle]
            read = []
            for sample, seed in zip(samples, seeds, strict=True):
                for seed_one in drawn_from:
                    seed_one(seed)
                seed_torch(seed)
                read.append(dataset[sample])
            self._idle = [name for name, generator in idle.items() if generator.draw() == _FIRST_IDLE[name]]
            if len(self._idle) == len(idle):
                return read

    def _first_batch(self, dataset: Any, samples: Sequence[int], seeds: Sequence[int]) -> list[Any]:
        read = []
        idle = dict(_GENERATORS)
        for sample, seed in zip(samples, seeds, strict=True):
            for generator in _GENERATORS.values():
                generator.seed(seed)
            seed_torch(seed)
            read.append(dataset[sample])
            idle = {name: one for name, one in idle.items() if one.draw() == one.first(seed)}
        self._idle = list(idle)
        return read


class _Generator(NamedTuple):
    seed: Callable[[int], None]
    draw: Callable[[], float]
    first: Callable[[int], float]
    """What ``draw`` returns right after ``seed``, if nothing was drawn in between; from a twin."""


_pythons_twin, _numpys_twin = random.Random(), np.random.RandomState(0)


def _first_of_python(seed: int) -> float:
    _pythons_twin.seed(seed)
    return _pythons_twin.random()


def _first_of_numpy(seed: int) -> float:
    _numpys_twin.seed(seed >> 32)
    return _numpys_twin.random_sample()


_GENERATORS = {
    "python": _Generator(seed_python, random.random, _first_of_python),
    "numpy": _Generator(seed_numpy, np.random.random_sample, _first_of_numpy),
}
# No number that a dataset would seed a generator with.
_IDLE_SEED = 0x5B2D71E96A0C48F3
_FIRST_IDLE = {name: generator.first(_IDLE_SEED) for name, generator in _GENERATORS.items()}
