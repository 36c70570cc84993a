"""Samples that are sorted by length within windows: each once, in the same order on any ranks and from any position."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pretended import in_training, pretended_rank, trained
from torch.utils.data import SubsetRandomSampler, WeightedRandomSampler

from unitrain import CheckpointError, ConfigError
from unitrain.data.order.order import Shuffled
from unitrain.features.balanced_batches import BalancedBatches
from unitrain.features.balanced_batches.sorting import SortedWindows

LENGTHS = [1 + 7 * i % 19 for i in range(50)]
BALANCED: dict[str, Any] = {"lengths": LENGTHS, "sort_window": 3}
OPTIONS = {"lengths", "costs", "max_cost", "sort_window"}
# Of 20 samples in windows of 2 batches of 4.
GOLDEN = [4, 9, 17, 11, 16, 10, 7, 15, 6, 14, 3, 19, 5, 18, 12, 1, 8, 13, 2, 0]


def in_windows(lengths: list[int], batch: int, batches: int, seed: int) -> NDArray[np.int64]:
    samples = len(lengths)
    values = np.array(lengths, float)
    order = SortedWindows(Shuffled(samples, seed, 0), samples, batch, values.__getitem__, batches, seed)
    return order.take(np.arange(samples))


def test_the_order_never_changes() -> None:
    assert in_windows(LENGTHS[:20], 4, 2, 0).tolist() == GOLDEN
    again = SortedWindows(Shuffled(20, 0, 0), 20, 4, np.array(LENGTHS, float).take, 2, 0)
    assert [again.take(np.array([i]))[0] for i in reversed(range(20))] == GOLDEN[::-1], "from any position"


LISTS = st.lists(st.integers(1, 9), min_size=1, max_size=60)


@given(LISTS, st.integers(1, 8), st.integers(2, 5), st.integers(0, 2**32 - 1))
def test_batches_of_a_window_are_sorted_and_shuffled(lengths: list[int], batch: int, batches: int, seed: int) -> None:
    before = Shuffled(len(lengths), seed, 0).take(np.arange(len(lengths))).tolist()
    after = in_windows(lengths, batch, batches, seed).tolist()
    whole = len(lengths) // batch * batch
    assert after[whole:] == before[whole:], "an incomplete batch is as it was"
    for begin in range(0, whole, batch * batches):
        end = min(begin + batch * batches, whole)
        assert sorted(after[begin:end]) == sorted(before[begin:end]), "a window has its samples"
        cut = [[lengths[i] for i in after[first : first + batch]] for first in range(begin, end, batch)]
        assert list(chain(*sorted(cut, reverse=True))) == sorted(chain(*cut), reverse=True)


def test_batches_come_in_another_order_in_each_window_and_epoch() -> None:
    by_length = BalancedBatches(lengths=lambda i: i + 1, sort_window=5)
    loader = pretended_rank().dataloader(list(range(600)), global_batch_size=2, batching=by_length)
    epochs = [[int(batch[0]) for batch in loader] for _ in range(2)]
    ranks = {tuple(np.argsort(firsts[i : i + 5])) for firsts in epochs for i in range(0, 300, 5)}
    assert len(ranks) > 60
    assert epochs[0] != epochs[1]


def loader_of(rank: int = 0, world_size: int = 1, **given: Any) -> Any:
    strategy = pretended_rank(rank, world_size, shares=given.pop("shares", None))
    settings = {
        "global_batch_size": 8,
        "shuffle": "sampler" not in given,
        "batching": BalancedBatches(**{**BALANCED, **{name: given.pop(name) for name in OPTIONS & given.keys()}}),
        **given,
    }
    return strategy.dataloader(list(range(50)), **settings)


def steps_of(loaders: list[Any]) -> list[list[int]]:
    """Return the sorted samples of each step, over all ranks."""
    found: dict[int, list[int]] = {}
    for loader in loaders:
        for batch in trained(loader):
            samples = [] if loader.stand_in else batch.tolist()
            found.setdefault(in_training(loader).step, []).extend(samples)
    return [sorted(samples) for samples in found.values()]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"max_cost": 40.0, "drop_last": True},
        {"micro_batch_size": 2},
        {"sampler": SubsetRandomSampler(range(3, 50))},
        {"sampler": WeightedRandomSampler([1.0] * 50, 61)},
    ],
    ids=["plain", "max_cost", "micro_batches", "sampler", "repeating"],
)
def test_the_order_is_the_same_on_any_ranks_and_after_a_resume_within_a_window(given: dict[str, Any]) -> None:
    whole = steps_of([loader_of(**given)])
    samples = list(chain(*whole))
    if "sampler" not in given:
        assert len(set(samples)) == len(samples) == (48 if "drop_last" in given else 50)
        padding = [max(LENGTHS[i] for i in step) * len(step) for step in whole]
        plain = [max(LENGTHS[i] for i in step) * len(step) for step in steps_of([loader_of(**given, sort_window=None)])]
        assert sum(padding) < 0.8 * sum(plain)
    for world_size, shares in ((1, None), (2, (1, 3)), (3, None)):
        first = loader_of(**given)
        list(trained(first, sum(1 for one in first._source.plan(0, 0) if one.step < 2)))
        state = first.state_dict()
        ranks = [loader_of(rank, world_size, shares=shares, **given) for rank in range(world_size)]
        assert steps_of(ranks) == whole
        ranks = [loader_of(rank, world_size, shares=shares, **given) for rank in range(world_size)]
        for rank in ranks:
            rank.load_state_dict(state)
        assert steps_of(ranks) == whole[2:]


@pytest.mark.parametrize(
    "given", [{"global_batch_size": 10}, {"sort_window": 2}, {"lengths": [1] * 50}, {"sort_window": None}], ids=str
)
def test_within_an_epoch_another_order_is_refused(given: dict[str, Any]) -> None:
    for before, after in (({}, given), (given, {})):
        first = loader_of(**before)
        list(trained(first, 1))
        state = first.state_dict()
        said = r"epoch 0 can't continue after .*: sort_window, .* lengths, the global batch size, on which"
        with pytest.raises(CheckpointError, match=said):
            loader_of(**after).load_state_dict(state)
        loader_of(**before).load_state_dict(state)
        other = loader_of(**after)
        other.load_state_dict({**state, "consumed": 0, "steps": 0, "global_batch_size": other.global_batch_size})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lengths": None}, "pass lengths .* or costs .*, not neither"),
        ({"lengths": None, "costs": LENGTHS}, "sort_window saves padding, but costs add up without padding: pass leng"),
        ({"batch_sampler": [[1, 2]]}, "sort_window makes global batches, and so does batch_sampler: sort in the batch"),
        ({"sort_window": 1}, "sort_window must be an integer of at least 2"),
        ({"sort_window": 2.5}, "sort_window must be an integer of at least 2 .global batches., not 2.5"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], message: str) -> None:
    if "batch_sampler" in given:
        given = {**given, "global_batch_size": None, "shuffle": False}
    with pytest.raises(ConfigError, match=message):
        loader_of(**given)


def test_a_stream_is_not_sorted() -> None:
    from streams import Numbers

    by_length = BalancedBatches(lengths=torch.Tensor.item, sort_window=2)
    with pytest.raises(ConfigError, match="sort in a buffer of the iterable dataset"):
        pretended_rank().dataloader(Numbers(9), batch_size=2, batching=by_length)
