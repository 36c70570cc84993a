"""A sample's random numbers don't depend on the process, worker, world or batch in which it is read."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from pretended import pretended_rank, trained
from torch import Tensor
from torch.utils.data import Dataset, Subset, WeightedRandomSampler

from unitrain.data import Loader
from unitrain.rng import sample_seeds

LENGTH = 23


class Augmented(Dataset[Tensor]):
    """A sample is its index, and one number of each generator."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        drawn = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(()))]
        return torch.tensor([float(index), *drawn], dtype=torch.float64)


class Together(Augmented):
    """Draws once for all that are read in one call."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        drawn = random.random()
        return [torch.tensor([float(index), drawn], dtype=torch.float64) for index in indices]


def rows(loader: Loader, count: int | None = None) -> list[list[float]]:
    return [row for batch in islice(loader, count) for row in batch.tolist()]


def loader_of(rank: int = 0, world_size: int = 1, data: Any = None, **given: Any) -> Loader:
    strategy = pretended_rank(rank, world_size, seed=given.pop("seed", 0))
    return strategy.dataloader(data or Augmented(), **{"global_batch_size": 4, "shuffle": True, **given})


def by_sample(given: list[list[float]]) -> dict[float, list[float]]:
    samples = {row[0]: row[1:] for row in given}
    assert len(samples) == len(given)
    return samples


EXPECTED = by_sample(rows(loader_of()))


def test_in_workers() -> None:
    loader = loader_of(num_workers=2, persistent_workers=True)
    assert by_sample(rows(loader)) == EXPECTED
    assert by_sample(rows(loader)) != EXPECTED, "the next epoch draws anew"
    loader.epoch = 0
    assert by_sample(rows(loader)) == EXPECTED


@pytest.mark.parametrize("world_size", [2, 7])
def test_on_any_rank(world_size: int) -> None:
    with torch.no_grad():  # an evaluation has no stand-ins
        parts = [row for rank in range(world_size) for row in rows(loader_of(rank, world_size))]
    assert by_sample(parts) == EXPECTED


def test_in_any_order_and_batch() -> None:
    assert by_sample(rows(loader_of(shuffle=False, global_batch_size=9))) == EXPECTED


def test_after_a_resume() -> None:
    loader = loader_of()
    begun = [row for batch in trained(loader, 3) for row in batch.tolist()]
    resumed = loader_of(num_workers=1)
    resumed.load_state_dict(loader.state_dict())
    assert by_sample(begun + rows(resumed)) == EXPECTED


def test_another_epoch_or_seed_draws_other_numbers() -> None:
    later, other = loader_of(), loader_of(seed=1)
    later.epoch = 1
    drawn = [value for loader in (later, other) for row in rows(loader) for value in row[1:]]
    drawn += [value for row in EXPECTED.values() for value in row]
    assert len(set(drawn)) == len(drawn), "no number is drawn twice, by any sample, generator or epoch"


def states() -> tuple[Any, ...]:
    state: Any = np.random.get_state(legacy=False)
    words = state["state"]
    numpys = (words["key"].tolist(), words["pos"], state["has_gauss"], state["gauss"])
    return random.getstate(), numpys, torch.get_rng_state().tolist()


@pytest.mark.parametrize("workers", [0, 1])
def test_the_process_keeps_its_own_generators(workers: int) -> None:
    random.gauss(0, 1)  # of the two that it makes, both keep the second
    np.random.randn()
    before = states()
    loader = loader_of(num_workers=workers)
    for batch in loader:
        assert states() == before
        assert len(batch)
    assert states() == before


def test_a_sample_that_is_drawn_twice_is_augmented_anew() -> None:
    def loader(rank: int, world_size: int) -> Loader:
        sampler = WeightedRandomSampler([1.0] * LENGTH, 60, replacement=True)
        return loader_of(rank, world_size, shuffle=False, sampler=sampler)

    alone = rows(loader(0, 1))
    assert max(Counter(row[0] for row in alone).values()) > 1
    assert len({row[1] for row in alone}) == 60
    together = [row for rank in range(3) for row in rows(loader(rank, 3))]
    assert sorted(together) == sorted(alone)


def test_a_dataset_that_reads_many_at_once_is_read_one_by_one() -> None:
    """What one call draws could not belong to a sample. Without sample_seeding it is used."""
    one_by_one = rows(loader_of(data=Together()))
    assert len({row[1] for row in one_by_one}) == LENGTH
    assert by_sample(one_by_one) == EXPECTED
    assert len({row[1] for row in rows(loader_of(data=Together(), sample_seeding=False))}) == 6
    subset = Subset(Together(), range(LENGTH))
    assert by_sample(rows(loader_of(data=subset))) == EXPECTED


def test_without_sample_seeding_a_sample_draws_from_the_process() -> None:
    random.seed(1)
    first = random.random()
    random.seed(1)
    assert rows(loader_of(sample_seeding=False), 1)[0][1] == first


def test_seeds_are_spread_over_samples_positions_epochs_and_seeds() -> None:
    samples = np.arange(10_000)
    seeds = {seed for run in range(3) for epoch in range(3) for seed in sample_seeds(run, epoch, samples)}
    seeds |= set(sample_seeds(0, 0, np.zeros(10_000, np.int64), samples))
    assert len(seeds) == 100_000
    bits = np.array([[seed >> bit & 1 for bit in range(64)] for seed in seeds])
    assert np.abs(bits.mean(0) - 0.5).max() < 0.01
