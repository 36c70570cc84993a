"""Samples draw the same numbers as if every generator were seeded for each of them, and are read once."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from unitrain.data.reading.seeded_reads import SeededReads
from unitrain.rng import generators_restored, sample_seeds, seed_generators

DRAW: dict[str, Callable[[], float]] = {
    "python": random.random,
    "python's pairs": lambda: random.gauss(0, 1),
    "numpy": lambda: float(np.random.rand()),
    "numpy's pairs": lambda: float(np.random.randn()),
    "torch": lambda: float(torch.rand(())),
}
SEEDS = sample_seeds(0, 0, np.arange(24))


class Drawing:
    """Samples that draw from some generators, from sample ``since`` on; counts how often each is read."""

    def __init__(self, *names: str, since: int = 0) -> None:
        self.names, self.since = names, since
        self.read: Counter[int] = Counter()

    def __getitem__(self, index: int) -> list[float]:
        self.read[index] += 1
        return [index, *(DRAW[name]() for name in self.names if index >= self.since)]


def expected(dataset: Any) -> list[Any]:
    """Return the samples, with every generator seeded for each."""
    samples = []
    with generators_restored():
        for index, seed in enumerate(SEEDS):
            seed_generators(seed)
            samples.append(dataset[index])
    return samples


def in_batches(reads: SeededReads, dataset: Any, size: int) -> list[Any]:
    samples = []
    with generators_restored():
        for start in range(0, len(SEEDS), size):
            batch = range(len(SEEDS))[start : start + size]
            samples += reads.read(dataset, batch, SEEDS[start : start + size])
    return samples


@pytest.mark.parametrize("size", [1, 5, 24])
@pytest.mark.parametrize("since", [0, 1, 7])
@pytest.mark.parametrize("names", [names for n in range(4) for names in itertools.combinations(DRAW, n)])
def test_whatever_samples_draw_from(names: tuple[str, ...], since: int, size: int) -> None:
    assert in_batches(SeededReads(), Drawing(*names, since=since), size) == expected(Drawing(*names, since=since))


def test_each_sample_is_read_once_where_the_first_batch_shows_what_is_drawn() -> None:
    for names in ((), tuple(DRAW)):
        dataset = Drawing(*names)
        in_batches(SeededReads(), dataset, 4)
        assert set(dataset.read.values()) == {1}


def test_a_batch_that_is_the_first_to_draw_is_read_again() -> None:
    """And it alone: sample 13 is in the fourth batch of four, as are 12, 14 and 15."""
    dataset = Drawing("python", "numpy", since=13)
    in_batches(SeededReads(), dataset, 4)
    assert {index for index, times in dataset.read.items() if times == 2} == {12, 13, 14, 15}
    assert max(dataset.read.values()) == 2


class SeedsItself:
    """Draws, then seeds the generators from its index alone, as some datasets do."""

    def __getitem__(self, index: int) -> list[float]:
        drawn = [random.random(), float(np.random.rand())]
        random.seed(index)
        np.random.seed(index)
        return [*drawn, random.random(), float(np.random.rand())]


def test_samples_that_seed_the_generators_themselves() -> None:
    assert in_batches(SeededReads(), SeedsItself(), 4) == expected(SeedsItself())


def test_torch_s_seed_can_be_read() -> None:
    """A generator of the dataset's own may be seeded with it, and no draw would show that."""

    class InitialSeed:
        def __getitem__(self, index: int) -> int:
            return torch.initial_seed()

    assert len(set(expected(InitialSeed()))) == len(SEEDS)
    assert in_batches(SeededReads(), InitialSeed(), 4) == expected(InitialSeed())
