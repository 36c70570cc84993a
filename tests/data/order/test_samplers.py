"""Users' samplers, batch samplers, collate functions and DataLoaders are sharded over the ranks."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from pretended import pretended_rank
from ranks import on_ranks
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import unitrain
from unitrain import CheckpointError, ConfigError, DataError
from unitrain.data import Loader

DATA: Any = list(range(20))  # any sequence is a map-style dataset


class OfEpoch(Sampler[int]):
    """Draws from python and numpy, and wants to know the epoch."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        chosen = random.sample(DATA, 9)
        return iter([self.epoch, *chosen, int(np.random.randint(20))])

    def __len__(self) -> int:
        return 11


def weighted() -> Sampler[int]:
    return WeightedRandomSampler([1.0 + i for i in DATA], 15, replacement=True)


def own_generator() -> Sampler[int]:
    return RandomSampler(DATA, generator=torch.Generator().manual_seed(5))


def global_batches(make: Callable[[Any], Loader], world_size: int, epochs: int = 2) -> list[list[int]]:
    """Return the global batches of some epochs, put together from every rank's part."""
    ranks = []
    for rank in range(world_size):
        loader = make(pretended_rank(rank, world_size))
        ranks.append([[] if loader.stand_in else batch.tolist() for _ in range(epochs) for batch in loader])
    return [
        [parts[i % world_size][i // world_size] for i in range(sum(map(len, parts)))]
        for parts in zip(*ranks, strict=True)
    ]


SAMPLERS: dict[str, Callable[[], Any]] = {
    "weighted": weighted,
    "subset": lambda: SubsetRandomSampler(range(3, 14)),
    "own_generator": own_generator,
    "of_epoch": OfEpoch,
    "list": lambda: [4, 4, 1, 0, 19],
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("world_size", [2, 5])
def test_a_sampler_yields_the_same_global_batches_on_any_number_of_ranks(name: str, world_size: int) -> None:
    def make(strategy: Any) -> Loader:
        loader: Loader = strategy.dataloader(DATA, sampler=SAMPLERS[name](), global_batch_size=4)
        return loader

    alone = global_batches(make, 1)
    assert global_batches(make, world_size) == alone
    half = len(alone) // 2
    assert (alone[:half] == alone[half:]) == (name == "list"), "each epoch is drawn anew"


@pytest.mark.parametrize("world_size", [2, 5])
def test_a_batch_sampler_yields_global_batches(world_size: int) -> None:
    def make(strategy: Any) -> Loader:
        batches = BatchSampler(RandomSampler(DATA), 6, drop_last=True)
        loader: Loader = strategy.dataloader(DATA, batch_sampler=batches)
        assert (len(loader), loader.steps_per_epoch, loader.global_batch_size) == (3, 3, None)
        return loader

    alone = global_batches(make, 1)
    assert [len(batch) for batch in alone] == [6] * 6
    assert len({tuple(batch) for batch in alone}) == 6
    assert global_batches(make, world_size) == alone


def test_a_batch_is_cut_into_the_micro_batches_of_one_step() -> None:
    loader = pretended_rank(accumulate=3).dataloader(DATA, batch_sampler=[[1, 2], [3, 4, 5, 6, 7, 8, 9], [0]])
    assert [batch.tolist() for batch in loader] == [[1], [2], [3, 4], [5, 6], [7, 8, 9], [0]]
    assert (len(loader), loader.steps_per_epoch) == (6, 3)


def test_a_sampler_leaves_every_generator_as_it_was() -> None:
    mine = torch.Generator().manual_seed(3)
    sampler = RandomSampler(DATA, generator=mine)
    before = torch.get_rng_state(), random.getstate(), mine.get_state()
    for given in (sampler, OfEpoch()):
        list(pretended_rank().dataloader(DATA, sampler=given, global_batch_size=4))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert torch.equal(mine.get_state(), before[2])


def test_a_sampler_may_change_its_length() -> None:
    class Growing(Sampler[int]):
        def set_epoch(self, epoch: int) -> None:
            self.length = 4 + 4 * epoch

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.length))

    loader = pretended_rank().dataloader(DATA, sampler=Growing(), global_batch_size=4)
    assert [(len(loader), len(list(loader))) for _ in range(3)] == [(1, 1), (2, 2), (3, 3)]


def test_a_sampler_that_the_script_changes_before_the_loop_is_drawn_from_then() -> None:
    indices = [0, 1, 2]
    loader = pretended_rank().dataloader(DATA, sampler=indices, global_batch_size=2)
    assert len(loader) == 2
    indices[:] = [7]
    assert [batch.tolist() for batch in loader] == [[7]]


@pytest.mark.parametrize("batches", [False, True])
def test_a_sampler_without_an_end_is_refused(batches: bool) -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return itertools.cycle(range(20))

    given: Any = {"batch_sampler": BatchSampler(Endless(), 8, False)} if batches else {"sampler": Endless()}
    with pytest.raises(DataError, match="more than 8388608 indices for one epoch: it seems to have no end"):
        pretended_rank().dataloader(DATA, **given, **({} if batches else {"global_batch_size": 8}))


def test_a_float_is_no_index() -> None:
    with pytest.raises(TypeError, match="float"):
        pretended_rank().dataloader(DATA, sampler=[1.5], global_batch_size=1)


class Own(Sampler[int]):
    """Draws from a generator of its own, which the loader does not know."""

    def __init__(self, seed: int | None) -> None:
        self._generator = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[int]:
        return iter(self._generator.permutation(20).tolist())


class Drifting(Sampler[int]):
    """Draws the same order on all ranks before an epoch, and another one on each from then on."""

    def __init__(self, rank: int, since: int) -> None:
        self.rank, self.since, self.epoch = rank, since, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        seed = self.rank if self.epoch >= self.since else 7
        return iter(np.random.default_rng(seed).permutation(20).tolist())


@on_ranks()
def test_a_sampler_that_differs_between_ranks_is_refused_on_all() -> None:
    with unitrain.init(device="cpu", timeout_s=20) as strategy:
        unseeded = torch.Generator()
        unseeded.seed()
        given: list[tuple[int, dict[str, Any]]] = [
            (0, {"sampler": Drifting(strategy.rank, 0), "batch_size": 2}),
            (0, {"batch_sampler": BatchSampler(Drifting(strategy.rank, 0), 4, False)}),
            (0, {"sampler": RandomSampler(DATA, generator=unseeded), "batch_size": 2}),
            (1, {"sampler": Drifting(strategy.rank, 1), "batch_size": 2}),
            (1, {"batch_sampler": BatchSampler(Drifting(strategy.rank, 1), 4, False)}),
        ]
        for since, options in given:
            loader = strategy.dataloader(DATA, **options)
            if since:
                assert sorted(strategy.gather([i for batch in loader for i in batch.tolist()])) == DATA
                if strategy.is_main:
                    next(iter(loader))  # to look at a batch is nothing that other ranks must do
            with pytest.raises(DataError, match="yields other indices on one rank than on another"):
                list(loader)


def test_an_epoch_does_not_continue_in_another_order() -> None:
    def loader(seed: int) -> Loader:
        return pretended_rank().dataloader(DATA, sampler=Own(seed), global_batch_size=4)

    one = loader(0)
    batches = iter(one)
    next(batches)
    state = one.state_dict()
    rest = [batch.tolist() for batch in batches]
    with pytest.raises(CheckpointError, match="epoch 0 can't continue after 4 samples: the sampler yields other ind"):
        loader(1).load_state_dict(state)
    other = loader(0)
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == rest


# ---------------------------------------------------------------------------------------------- a torch DataLoader


def test_a_dataloader_that_changes_its_batches_is_refused() -> None:
    class Changing(DataLoader[Any]):
        def __iter__(self) -> Any:
            return (2 * batch for batch in super().__iter__())

    with pytest.raises(DataError, match=r"Changing\.__iter__ would not be called"):
        pretended_rank().dataloader(Changing(DATA, 4))


def test_a_dataloader_is_converted() -> None:
    def batches(loader: DataLoader[Any], **given: Any) -> list[list[int]]:
        return [batch.tolist() for batch in pretended_rank().dataloader(loader, **given)]

    assert batches(DataLoader(DATA, 4)) == [DATA[i : i + 4] for i in range(0, 20, 4)]
    assert batches(DataLoader(DATA, 8, drop_last=True)) == [DATA[:8], DATA[8:16]]
    assert batches(DataLoader(DATA, 4, num_workers=1, timeout=30), global_batch_size=10) == [DATA[:10], DATA[10:]]
    assert batches(DataLoader(DATA, batch_sampler=[[1, 2], [5]])) == [[1, 2], [5]]
    assert batches(DataLoader(DATA, 2, sampler=[7, 8, 9])) == [[7, 8], [9]]
    nine = RandomSampler(DATA, replacement=True, num_samples=9)
    assert [len(batch) for batch in batches(DataLoader(DATA, 6, sampler=nine))] == [6, 3]
    assert batches(DataLoader(DATA, 2, collate_fn=lambda samples: torch.tensor(samples) + 100, sampler=[7])) == [[107]]
    shuffled = batches(DataLoader(DATA, 20, shuffle=True))
    assert shuffled == [list(batch) for batch in pretended_rank().dataloader(DATA, batch_size=20, shuffle=True)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_dataloader_with_a_distributed_sampler_is_not_sharded_twice(shuffle: bool) -> None:
    sampler: Sampler[int] = DistributedSampler(DATA, num_replicas=2, rank=1, shuffle=shuffle)
    converted = pretended_rank().dataloader(DataLoader(DATA, 20, sampler=sampler))
    (batch,) = converted
    assert sorted(batch.tolist()) == DATA
    assert (batch.tolist() == DATA) != shuffle
    with pytest.raises(ConfigError, match=f"twice: pass shuffle={shuffle}"):
        pretended_rank().dataloader(DATA, batch_size=2, sampler=sampler)


class Weighted(DistributedSampler[int]):
    """Draws a rank's indices by weights, from its own seed."""

    def __iter__(self) -> Iterator[int]:
        draw = torch.Generator().manual_seed(self.epoch)
        drawn = torch.multinomial(torch.arange(1.0, 21.0), 20, replacement=True, generator=draw).tolist()
        return iter(drawn[self.rank :: self.num_replicas])


@pytest.mark.parametrize("batches", [False, True])
def test_a_sampler_of_one_rank_is_refused_with_the_way_to_make_it(batches: bool) -> None:
    def converted(replicas: int) -> Any:
        sampler = Weighted(DATA, num_replicas=replicas, rank=0)
        given: dict[str, Any] = {"batch_size": 4, "sampler": sampler}
        if batches:
            given = {"batch_sampler": BatchSampler(sampler, 4, False)}
        return pretended_rank().dataloader(DataLoader(DATA, **given))

    with pytest.raises(ConfigError, match=r"a Weighted of 2 replicas yields the indices of one rank.* num_replicas=1"):
        converted(2)
    read = converted(1)
    for epoch in range(2):
        sampler = Weighted(DATA, num_replicas=1, rank=0)
        sampler.set_epoch(epoch)
        assert [index for batch in read for index in batch.tolist()] == list(sampler)


def test_samplers_of_torch_over_other_data_are_kept() -> None:
    for few in (RandomSampler(range(5)), torch.utils.data.SequentialSampler(range(5))):
        (batch,) = pretended_rank().dataloader(DataLoader(DATA, 20, sampler=few))
        assert sorted(batch.tolist()) == [0, 1, 2, 3, 4]


def test_contradictions_are_refused() -> None:
    strategy = pretended_rank()
    for given, message in (
        ({"batch_size": 2, "shuffle": True, "sampler": [1]}, "shuffle and sampler are mutually exclusive"),
        ({"batch_size": 2, "batch_sampler": [[1]]}, "batch_sampler is mutually exclusive with"),
        ({"batch_sampler": [[1]], "drop_last": True}, "batch_sampler is mutually exclusive with"),
        ({"sampler": [1], "batch_sampler": [[1]]}, "sampler and batch_sampler are mutually exclusive"),
    ):
        with pytest.raises(ConfigError, match=message):
            strategy.dataloader(DATA, **given)
    with pytest.raises(DataError, match="batch_size=None"):
        strategy.dataloader(DataLoader(DATA, None))


# ------------------------------------------------------------------------------------------------ collate functions


@dataclass(frozen=True)
class Record:
    rows: Tensor
    kind: str = "record"


def as_detection(samples: list[int]) -> tuple[tuple[Any, ...], ...]:
    return tuple(zip(*((torch.zeros(3, sample), {"id": sample}) for sample in samples), strict=True))


def as_record(samples: list[int]) -> dict[str, Record]:
    assert samples, "a collate function sees no empty list"
    return defaultdict(list, {"record": Record(torch.tensor(samples))})  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [as_detection, as_record])
def test_a_rank_without_samples_gets_a_stand_in(collate: Callable[..., Any], workers: int) -> None:
    """Of 5 samples in batches of 4, rank 2 of 3 gets none the second time, and stands in with the only one there is."""
    strategy = pretended_rank(2, 3)
    loader = strategy.dataloader(DATA[:5], global_batch_size=4, collate_fn=collate, num_workers=workers)
    batches = []
    for batch in loader:
        batches.append(batch)
        assert loader.stand_in == (len(batches) == 2)
    assert repr(batches[1]) == repr(collate([DATA[4]]))
    with torch.no_grad():
        assert len(list(loader)) == 1  # an evaluation sees each sample once


def test_the_generator_of_a_dataloader_that_shuffles_counts() -> None:
    def read(seed: int | None) -> list[int]:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        given: DataLoader[Any] = DataLoader(DATA, batch_size=4, shuffle=True, generator=generator)
        return [i for batch in pretended_rank().dataloader(given) for i in batch.flatten().tolist()]

    assert sorted(read(1)) == sorted(read(2)) == sorted(read(None))
    assert read(1) == read(1) != read(2)
    assert read(1) != read(None)
