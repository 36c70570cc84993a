"""The order of an epoch: pinned, a bijection, and as uniform as a shuffle is."""

from __future__ import annotations

import math
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from unitrain.data.order import order
from unitrain.data.order.order import Shuffled

GOLDEN = {
    (7, 0, 0): [4, 5, 3, 6, 1, 2, 0],
    (65_535, 0, 0): [24023, 51243, 2411, 35453, 22081, 57660, 38766, 21476],
    (65_536, 0, 0): [7237, 16196, 49468, 52999, 42992, 46154, 51265, 30254],
    (1_000_003, 1, 2): [758309, 427188, 66004, 707747, 91211, 682498, 484046, 164422],
    (10**9, 2**32 - 1, 0): [347389947, 779825791, 25657015, 876157571, 292620132, 660603916, 670762073, 927764773],
    (2**62, 7, 123_456): [1713048975592910141, 3801142010377244609, 4200493380660036951, 125470668966622349],
}


def shuffled(samples: int, seed: int = 0, epoch: int = 0) -> NDArray[np.int64]:
    return Shuffled(samples, seed, epoch).take(np.arange(samples))


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_the_order_never_changes(case: tuple[int, int, int]) -> None:
    assert Shuffled(*case).take(np.arange(len(GOLDEN[case]))).tolist() == GOLDEN[case]


@given(
    st.one_of(st.integers(0, 3_000), st.integers(65_500, 70_000), st.sampled_from([2**17, 2**17 + 1, 300_007])),
    st.integers(0, 2**32 - 1),
    st.integers(0, 10_000),
)
def test_every_sample_stands_at_one_position(samples: int, seed: int, epoch: int) -> None:
    assert (np.sort(shuffled(samples, seed, epoch)) == np.arange(samples)).all()


@given(st.integers(1, 2**62), st.integers(0, 2**32 - 1), st.data())
def test_any_positions_can_be_read_in_any_order(samples: int, seed: int, data: st.DataObject) -> None:
    samples = samples if samples >= 2**16 else samples + 2**16
    positions = np.array(data.draw(st.lists(st.integers(0, samples - 1), min_size=1, max_size=20, unique=True)))
    one_by_one = [Shuffled(samples, seed, 0).take(positions[i : i + 1])[0] for i in range(len(positions))]
    taken = Shuffled(samples, seed, 0).take(positions)
    assert taken.tolist() == one_by_one
    assert len(set(taken.tolist())) == len(positions)
    assert 0 <= taken.min() <= taken.max() < samples


@pytest.mark.parametrize("samples", [100, 100_000])
@pytest.mark.parametrize("position", [-1, 0])
def test_other_positions_are_refused(samples: int, position: int) -> None:
    with pytest.raises(IndexError):
        Shuffled(samples, 0, 0).take(np.array([0, position or samples]))


# ------------------------------------------------------------------------------------------------------ uniformity
# Each test's number of standard deviations from what a uniform shuffle gives. Seeds are fixed, so a test that passes
# always does.


def normal(value: float, mean: float, deviation: float) -> float:
    return abs(value - mean) / deviation


def cells(shuffle: Shuffled, samples: int, buckets: int = 32) -> float:
    """Chi-square of (bucket of the position, bucket of the sample), over its degrees of freedom."""
    taken = shuffle.take(np.arange(samples))
    counts = np.bincount(np.arange(samples) * buckets // samples * buckets + taken * buckets // samples)
    expected = samples / buckets**2
    return float(((counts - expected) ** 2 / expected).sum()) / (buckets - 1) ** 2


def positions_are_uniform(samples: int, seeds: int) -> float:
    """Mean over seeds of the chi-square, whose variance for a uniform shuffle is 2 / degrees of freedom."""
    means = [cells(Shuffled(samples, seed, 0), samples) for seed in range(seeds)]
    return normal(float(np.mean(means)), samples / (samples - 1), math.sqrt(2 / 31**2 / seeds))


def successions(samples: int, epochs: int) -> float:
    """How often a sample is followed by the next one: once per shuffle, as a Poisson number."""
    found = 0
    for epoch in range(epochs):
        found += int((np.diff(shuffled(samples, 0, epoch)) == 1).sum())
    return normal(found, epochs, math.sqrt(epochs))


@pytest.mark.parametrize("samples", [65_536, 65_537, 100_003])
def test_positions_are_uniform(samples: int) -> None:
    assert positions_are_uniform(samples, 100) < 3.5


@pytest.mark.parametrize("samples", [60_000, 65_536, 100_003])
def test_neighbours_are_not_kept(samples: int) -> None:
    assert successions(samples, 200) < 3.5


@pytest.mark.parametrize("samples", [60_000, 100_003])
@pytest.mark.parametrize("by", ["epoch", "seed"])
def test_epochs_and_seeds_are_independent(samples: int, by: str) -> None:
    orders = [shuffled(samples, 0, i) if by == "epoch" else shuffled(samples, i) for i in range(30)]
    correlations, same = [], 0
    for one, other in pairwise(orders):
        correlations.append(np.corrcoef(one, other)[0, 1] * math.sqrt(samples))
        same += int((one == other).sum())
    assert np.abs(correlations).max() < 4.5
    assert normal(same, len(correlations), math.sqrt(len(correlations))) < 3.5


def test_all_orders_of_a_few_samples_are_equally_frequent() -> None:
    counts = dict.fromkeys(permutations(range(5)), 0)
    for epoch in range(12_000):
        counts[tuple(shuffled(5, 0, epoch).tolist())] += 1
    chi_square = sum((count - 100) ** 2 / 100 for count in counts.values())
    assert normal(chi_square, 119, math.sqrt(2 * 119)) < 3.5


def test_nothing_is_built_for_a_large_dataset() -> None:
    shuffle = Shuffled(10**12, 0, 0)
    assert 0 <= shuffle.take(np.array([10**12 - 1]))[0] < 10**12
    assert sum(getattr(value, "nbytes", 0) for value in vars(shuffle).values()) <= 8 * order._ROUNDS
