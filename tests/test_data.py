"""What strategy.dataloader takes, refuses and hands out: batches on the device, empty ones, workers, evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pretended import in_training, pretended_rank
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset, TensorDataset

import unitrain
from unitrain import ConfigError, DataError, Strategy


@pytest.fixture
def strategy() -> Iterator[Strategy]:
    with unitrain.init(backend="single", device="cpu") as strategy:
        yield strategy


class Records(Dataset[dict[str, Any]]):
    """Samples of every type that torch's collate function knows."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return {
            "image": torch.full((2, 2), float(index)),
            "label": index,
            "name": f"sample {index}",
            "pair": (torch.tensor(index), float(index)),
        }


# ------------------------------------------------------------------------------------------------------ batches


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_torch_s(strategy: Strategy, workers: int) -> None:
    ours = list(strategy.dataloader(Records(7), batch_size=3, num_workers=workers))
    torchs = list(DataLoader(Records(7), batch_size=3))
    assert [batch["name"] for batch in ours] == [batch["name"] for batch in torchs]
    for mine, its in zip(ours, torchs, strict=True):
        assert mine.keys() == its.keys()
        assert torch.equal(mine["image"], its["image"])
        assert torch.equal(mine["label"], its["label"])
        assert type(mine["pair"]) is type(its["pair"])
        assert torch.equal(mine["pair"][1], its["pair"][1])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_without_samples_gets_the_same_structure(workers: int) -> None:
    loader = pretended_rank(2, 3).dataloader(Records(5), global_batch_size=3, num_workers=workers)
    batches, counts = [], []
    for batch in loader:
        batches.append(batch)
        counts.append(in_training(loader).count)
    full, empty = batches
    assert empty.keys() == full.keys()
    assert (empty["image"].shape, empty["image"].dtype) == ((0, 2, 2), torch.float32)
    assert (empty["label"].shape, empty["label"].dtype) == ((0,), torch.int64)
    assert empty["name"] == []
    assert [part.shape for part in empty["pair"]] == [(0,), (0,)]
    assert counts == [1, 0]


def collate_to_count(samples: list[int]) -> int:
    return len(samples)


def test_what_can_not_be_cut_to_no_rows_says_what_to_do() -> None:
    settings: dict[str, Any] = {"global_batch_size": 2, "collate_fn": collate_to_count}
    batches = iter(pretended_rank(1, 2).dataloader([1, 2, 3], **settings))
    assert next(batches) == 1
    with pytest.raises(DataError, match="drop_last=True"):
        next(batches)
    assert list(pretended_rank(1, 2).dataloader([1, 2, 3], drop_last=True, **settings)) == [1]


@pytest.mark.parametrize(
    ("world_size", "batch_size", "accumulate", "batches", "steps"),
    [(1, 4, 1, 6, 6), (2, 4, 1, 3, 3), (3, 4, 1, 2, 2), (2, 2, 3, 6, 2), (5, 4, 1, 2, 2)],
)
def test_batch_size_is_that_of_one_process(
    world_size: int, batch_size: int, accumulate: int, batches: int, steps: int
) -> None:
    data = TensorDataset(torch.arange(23))
    for rank in range(world_size):
        loader = pretended_rank(rank, world_size, accumulate=accumulate).dataloader(data, batch_size=batch_size)
        assert (len(loader), loader.steps_per_epoch, len(list(loader))) == (batches, steps, batches)
        assert loader.global_batch_size == world_size * batch_size * accumulate
        assert max(len(rows) for (rows,) in loader) == batch_size


def test_each_iteration_is_an_epoch(strategy: Strategy) -> None:
    loader = strategy.dataloader(range(20), batch_size=20, shuffle=True)
    orders = [batch.tolist() for _ in range(3) for batch in loader]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    again = strategy.dataloader(range(20), batch_size=20, shuffle=True)
    assert [batch.tolist() for _ in again.epochs(3) for batch in again] == orders


def test_a_dataset_s_own_batches_are_read_at_once(strategy: Strategy) -> None:
    class Table(Dataset[int]):
        asked: list[list[int]] = []

        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> int:
            raise AssertionError("one by one")

        def __getitems__(self, indices: list[int]) -> list[int]:
            self.asked.append(indices)
            return indices

    loader = strategy.dataloader(Subset(Table(), [4, 3, 2]), batch_size=2, sample_seeding=False)
    assert [batch.tolist() for batch in loader] == [[4, 3], [2]]
    assert Table.asked == [[4, 3], [2]]


# --------------------------------------------------------------------------------------------------- evaluation


def counted_over_ranks(length: int) -> tuple[int, float]:
    with unitrain.init() as strategy:
        model = strategy.prepare(nn.Linear(1, 1))
        data = TensorDataset(torch.arange(float(length)))
        meter = strategy.meter()
        with strategy.evaluation(model):
            for (values,) in strategy.dataloader(data, batch_size=64):
                meter.add(total=values.sum(), count=len(values))
        return meter.count(), meter.value()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_counts_each_sample_once(world_size: int) -> None:
    assert run_ranks(counted_over_ranks, 1001, nprocs=world_size) == [(1001, 500.0)] * world_size


@pytest.mark.parametrize("how", ["evaluation", "no_grad"])
def test_an_evaluation_within_an_epoch_is_not_what_is_trained_on(strategy: Strategy, how: str) -> None:
    model = nn.Linear(1, 1)
    train = strategy.dataloader(TensorDataset(torch.ones(8, 1)), batch_size=4)
    test = strategy.dataloader(TensorDataset(torch.ones(3, 1)), batch_size=1)
    for _ in train:
        before = in_training(train)
        with strategy.evaluation(model) if how == "evaluation" else torch.no_grad():
            assert len(list(test)) == 3
        assert in_training(train) is before


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "exactly one of global_batch_size .* and batch_size .*; got None and None"),
        ({"batch_size": 2, "global_batch_size": 4}, "got 4 and 2"),
        ({"batch_size": 0}, "at least 1, not 0"),
        ({"batch_size": 2.0}, "at least 1, not 2.0"),
        ({"batch_size": True}, "at least 1, not True"),
        ({"global_batch_size": -1}, "at least 1, not -1"),
        ({"batch_size": 2, "num_wokers": 2}, "no setting 'num_wokers'. Did you mean 'num_workers'"),
        ({"batch_size": 2, "generator": torch.Generator()}, "'generator': the order follows from the strategy's seed"),
        ({"batch_size": 2, "in_order": False}, "'in_order'"),
        ({"batch_size": 2, "pin_memory_device": "cuda"}, "'pin_memory_device'"),
        ({"batch_size": 2, "sharded": True}, "sharded is for iterable datasets"),
    ],
)
def test_wrong_settings(strategy: Strategy, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        strategy.dataloader([1, 2, 3], **settings)


def test_a_batch_smaller_than_its_micro_batches() -> None:
    with pytest.raises(ConfigError, match="global_batch_size 3 can't be cut into accumulate=4 micro-batches"):
        pretended_rank(accumulate=4).dataloader([1, 2, 3], global_batch_size=3)


class WithoutLength:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "no batch can be made: 0 samples"),
        (WithoutLength(), "WithoutLength has no __len__"),
        ((i for i in range(3)), "a generator can be read only once"),
        (7, "int is no dataset"),
        (None, "NoneType is no dataset"),
    ],
)
def test_wrong_datasets(strategy: Strategy, dataset: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        strategy.dataloader(dataset, batch_size=2)


def test_drop_last_of_everything(strategy: Strategy) -> None:
    with pytest.raises(DataError, match="3 samples, a global batch of 4, drop_last=True"):
        strategy.dataloader([1, 2, 3], batch_size=4, drop_last=True)


class Broken(Records):
    def __getitem__(self, index: int) -> Any:
        if index == 4:
            raise ZeroDivisionError("sample 4 is broken")
        return super().__getitem__(index)


def test_an_error_of_the_dataset_stays_what_it_is(strategy: Strategy) -> None:
    # With workers it does, too, but torch then takes 5 s to end each of them.
    loader = strategy.dataloader(Broken(6), batch_size=2)
    batches = iter(loader)
    assert next(batches)["label"].tolist() == [0, 1]
    assert next(batches)["label"].tolist() == [2, 3]
    with pytest.raises(ZeroDivisionError, match="sample 4 is broken"):
        next(batches)


# -------------------------------------------------------------------------------------------- a torch DataLoader


def double(samples: list[int]) -> Tensor:
    return 2 * torch.tensor(samples)


def test_settings_of_a_dataloader_are_taken_over(strategy: Strategy) -> None:
    settings: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "timeout": 30, "collate_fn": double}
    data: Any = list(range(6))
    torchs: DataLoader[int] = DataLoader(data, batch_size=4, **settings)
    assert [batch.tolist() for batch in strategy.dataloader(torchs)] == [[0, 2, 4, 6], [8, 10]]
    here = strategy.dataloader(torchs, batch_size=3, num_workers=0)
    assert [batch.tolist() for batch in here] == [[0, 2, 4], [6, 8, 10]]
    nine: DataLoader[int] = DataLoader(data, 6, sampler=RandomSampler(data, replacement=True, num_samples=9))
    assert [len(batch) for batch in strategy.dataloader(nine)] == [6, 3]


ORDERS: list[dict[str, Any]] = [{"shuffle": True}, {"sampler": [1, 2]}, {"drop_last": True}, {"batch_sampler": [[1]]}]


@pytest.mark.parametrize("given", ORDERS, ids=lambda given: next(iter(given)))
def test_what_a_dataloader_decides_is_not_given_again(strategy: Strategy, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(given))}.*DataLoader"):
        strategy.dataloader(DataLoader([1, 2, 3], batch_size=2), **given)  # type: ignore[arg-type]
