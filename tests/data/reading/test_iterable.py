"""Iterable datasets: each sample is read exactly once, and all ranks end together."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from pretended import pretended_rank, trained
from ranks import run_ranks
from streams import (
    WORLDS,
    Numbers,
    Shuffling,
    SplitsAmongWorkers,
    StatefulShuffling,
    of_workers,
)  # fmt: skip
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import unitrain
from unitrain import CheckpointError, ConfigError, DataError
from unitrain.data.reading.fingerprint import sample_digest

# -------------------------------------------------------------------------------------------- the whole, on each rank


def read_stream(workers: int, kind: type[Numbers]) -> list[tuple[list[int], int]]:
    strategy = unitrain.init(accumulate=2)
    loader = strategy.dataloader(kind(25), global_batch_size=8, **of_workers(workers))
    batches = [(batch.tolist(), strategy._step.batches.micro_batch.window) for batch in loader]  # type: ignore[union-attr]
    assert len(list(loader)) == len(batches), "the next epoch reads it again"
    return batches


@pytest.mark.parametrize(("world_size", "launcher"), WORLDS)
@pytest.mark.parametrize(("workers", "kind"), [(0, Numbers), (2, Numbers), (2, SplitsAmongWorkers)])
def test_a_stream_has_the_same_global_batches_on_any_rank_and_worker(
    world_size: int, launcher: Literal["spawn", "horovodrun"], workers: int, kind: type[Numbers]
) -> None:
    ranks = run_ranks(read_stream, workers, kind, nprocs=world_size, launcher=launcher)
    alone = [list(range(i, min(i + 4, 25))) for i in range(0, 25, 4)]
    windows = [8, 8, 8, 8, 8, 8, 1]
    nothing: tuple[list[int], None] = ([], None)
    for parts, whole, window in zip(itertools.zip_longest(*ranks, fillvalue=nothing), alone, windows, strict=True):
        assert [part[0] for part in parts] == [whole[rank::world_size] for rank in range(world_size)]
        assert {part[1] for part in parts if part[0]} == {window}


def test_a_stream_continues_where_its_state_was_taken() -> None:
    def loader(world_size: int = 1) -> Any:
        return pretended_rank(0, world_size).dataloader(Shuffling(), global_batch_size=4)

    whole = [batch.tolist() for batch in loader()]
    first = loader()
    begun = [batch.tolist() for batch in trained(first, 2)]
    state = first.state_dict()
    assert (state["consumed"], state["length"], state["readers"]) == (8, None, None)
    rest = loader()
    rest.load_state_dict(state)
    assert begun + [batch.tolist() for batch in rest] == whole
    loader(3).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_with_a_state_continues_without_reading_again(workers: int) -> None:
    def loader(rank: int = 0, world_size: int = 1, workers: int = workers) -> Any:
        strategy = pretended_rank(rank, world_size)
        return strategy.dataloader(StatefulShuffling(), global_batch_size=4, **of_workers(workers))

    whole = [row for batch in loader() for row in batch.tolist()]
    first = loader()
    assert [row for batch in trained(first, 2) for row in batch.tolist()] == whole[:8]
    state = first.state_dict()
    assert state["seeks"] == [0, [[0, 0, 1, [8, {"position": 8}]]], [[0, 0, sample_digest(torch.tensor(whole[0]))]]]
    for world_size in (1, 3):
        for rank in range(world_size):
            rest = loader(rank, world_size, workers=0)
            rest.load_state_dict(state)
            rows = [row for batch in rest for row in batch.tolist()]
            assert rows == [row for step in range(8, 20, 4) for row in whole[step : step + 4][rank::world_size]]
            assert rest.dataset.read == [] or rest.dataset.read == list(range(9, 21))
            assert rest.dataset.position == 0, "the script's own dataset is left alone"
    # The end is in no state: many datasets begin anew from theirs then.
    ended = loader()
    list(trained(ended, 5))
    again = loader()
    again.load_state_dict(ended.state_dict())
    assert list(again) == []


class OwnRandom(IterableDataset[Tensor]):
    """A dataset that shuffles by random numbers that nobody can seed, and shards itself if it is told to."""

    def __iter__(self) -> Iterator[Tensor]:
        numbers = list(range(1000))
        random.SystemRandom().shuffle(numbers)
        return iter(torch.tensor(numbers[:20]))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_is_read_again_in_another_order_is_warned_of(workers: int, sharded: bool) -> None:
    def loader() -> Any:
        return pretended_rank().dataloader(OwnRandom(), sharded=sharded, global_batch_size=4, **of_workers(workers))

    differ = pytest.warns(UserWarning, match="OwnRandom yields different samples in each worker of the loader")
    in_workers: AbstractContextManager[Any] = nullcontext() if sharded or not workers else differ
    first = loader()
    with in_workers:
        list(trained(first, 2))
    resumed = loader()
    resumed.load_state_dict(first.state_dict())
    with (
        in_workers,
        pytest.warns(UserWarning, match=r"OwnRandom is read again to continue in epoch 0, and begins with"),
    ):
        list(resumed)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        list(first)  # the epoch again, and then the next one, as they come
        list(resumed)
    assert not [one for one in seen if "again" in str(one.message)]


def test_a_stream_that_knows_its_length_plans_with_it() -> None:
    class Sized(Numbers):
        def __len__(self) -> int:
            return self.length

    loader = pretended_rank(accumulate=2).dataloader(Sized(25), global_batch_size=8)
    assert (len(loader), loader.steps_per_epoch) == (len(list(loader)), 4)
    unsized = pretended_rank().dataloader(Numbers(25), global_batch_size=8)
    with pytest.raises(TypeError, match="no len"):
        len(unsized)


def test_what_shards_itself_continues_on_the_same_ranks_and_workers_only() -> None:
    def loader(world_size: int = 1, **given: Any) -> Any:
        return pretended_rank(0, world_size).dataloader(Numbers(9), sharded=True, **{"batch_size": 2, **given})

    first = loader()
    begun = [sample for batch in trained(first, 2) for sample in batch.tolist()]
    state = first.state_dict()
    assert (state["readers"], state["steps"]) == ([1, 1, 2, []], 2)
    same = loader()
    same.load_state_dict(state)
    assert begun + [sample for batch in same for sample in batch.tolist()] == list(range(9))
    said = "1 ranks with 1 workers each read this Numbers, which shards itself, and now 2 with 1 do: it can't continue"
    with pytest.raises(CheckpointError, match=said):
        loader(2, batch_size=1).load_state_dict(state)
    first.epoch = 1
    other = loader(2, batch_size=1)
    other.load_state_dict(first.state_dict())
    assert other.epoch == 1


class OfRank(Numbers):
    """Shards itself without saying so."""

    def __iter__(self) -> Iterator[Tensor]:
        return (number + 100 * dist.get_rank() for number in super().__iter__())


def unsaid_shards(sharded: bool | None) -> list[int]:
    strategy = unitrain.init(timeout_s=30)
    loader = strategy.dataloader(OfRank(4), batch_size=2, sharded=sharded)
    return [sample for batch in loader for sample in batch.tolist()]


def test_shards_that_nobody_spoke_of_are_noticed() -> None:
    with pytest.raises(DataError, match="pass sharded=True"):
        run_ranks(unsaid_shards, None, nprocs=2)
    assert run_ranks(unsaid_shards, True, nprocs=2) == [[0, 1, 2, 3], [100, 101, 102, 103]]


def not_sharded_at_all() -> list[str]:
    strategy = unitrain.init(timeout_s=30)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(strategy.dataloader(Numbers(4), batch_size=2, sharded=True))
    return [str(one.message) for one in caught]


def test_a_stream_that_is_not_sharded_at_all_is_noticed() -> None:
    (warning,), others = run_ranks(not_sharded_at_all, nprocs=2)
    assert "begins with the same sample on every rank" in warning
    assert not others


def test_what_can_not_be_read_is_refused() -> None:
    strategy = pretended_rank(0, 2, accumulate=2)
    with pytest.raises(DataError, match="neither __getitem__ nor __iter__"):
        strategy.dataloader(object(), batch_size=1)
    with pytest.raises(ConfigError, match="shuffle is not supported for an iterable dataset"):
        strategy.dataloader(Numbers(3), batch_size=1, shuffle=True)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("data", [Numbers(10), list(range(10))])
def test_a_stateful_dataloader_is_converted(data: Any) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = pretended_rank().dataloader(StatefulDataLoader(data, 4))
    first = [batch.tolist() for batch in trained(loader, 1)]
    resumed = pretended_rank().dataloader(StatefulDataLoader(data, 4))
    resumed.load_state_dict(loader.state_dict())
    assert first + [batch.tolist() for batch in resumed] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_dataloader_of_a_stream_is_converted() -> None:
    loader = pretended_rank().dataloader(DataLoader(Numbers(5), 4, drop_last=True))
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3]]
