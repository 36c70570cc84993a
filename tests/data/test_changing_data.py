"""A dataset that changes between epochs: an epoch has the samples that the dataset has when it begins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pretended import pretended_rank
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset

from unitrain import CheckpointError, DataError
from unitrain.features.balanced_batches import BalancedBatches


class Pool(Dataset[int]):
    def __init__(self) -> None:
        self.items = list(range(16))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> int:
        return self.items[index]


def ordered(data: Any) -> dict[str, Any]:
    return {"dataset": data}


def shuffled(data: Any) -> dict[str, Any]:
    return {"dataset": DataLoader(data, batch_size=2, shuffle=True), "batch_size": None}


def sampled(data: Any) -> dict[str, Any]:
    return {"dataset": data, "sampler": RandomSampler(data)}


def kept(data: Any) -> dict[str, Any]:
    return {"dataset": data, "num_workers": 1, "persistent_workers": True}


@pytest.mark.parametrize("given", [ordered, shuffled, sampled, kept])
def test_an_epoch_has_the_samples_of_its_time(given: Any) -> None:
    pools = [Pool(), Pool()]
    loaders = [pretended_rank(r, 2).dataloader(**{"batch_size": 2, **given(pool)}) for r, pool in enumerate(pools)]
    for length in (16, 24, 24, 6):
        for pool in pools:
            pool.items = [*pool.items, *range(len(pool), length)][:length]
        read: list[int] = []
        for loader in loaders:
            assert (len(loader), loader.samples) == (-(-length // 4), length)
            read += [i for batch in loader if not loader.stand_in for i in batch.tolist()]
        assert sorted(read) == list(range(length))


def test_within_an_epoch_nothing_changes() -> None:
    pool = Pool()
    loader = pretended_rank().dataloader(Subset(pool, pool.items), batch_size=4)
    batches = iter(loader)
    next(batches)
    pool.items += [16, 17, 18]
    assert (len(loader), len(list(batches))) == (4, 3)
    assert len(loader) == 5
    batches = iter(loader)
    next(batches)
    pool.items += [19]
    state = loader.state_dict()
    assert (state["length"], state["consumed"]) == (19, 4)
    with pytest.raises(CheckpointError, match="its length is 19, but this one's is 20"):
        pretended_rank().dataloader(pool, batch_size=4).load_state_dict(state)


@pytest.mark.parametrize("given", [shuffled, sampled])
@pytest.mark.parametrize("consumed", [3, 8], ids=["within", "at the end"])
def test_a_resumed_epoch_has_the_samples_of_its_beginning(given: Any, consumed: int) -> None:
    pool = Pool()
    loader, resumed = (pretended_rank().dataloader(**{"batch_size": 2, **given(pool)}) for _ in range(2))
    batches = iter(loader)
    for _ in range(consumed):
        next(batches)
    resumed.load_state_dict(loader.state_dict())
    rest = [batch.tolist() for batch in batches]
    pool.items += [16, 17, 18]
    assert [batch.tolist() for batch in resumed] == rest
    assert len(resumed) == 10


class Curriculum(Pool):
    def set_epoch(self, epoch: int) -> None:
        self.items = [100 * epoch + i for i in range(16)]


@pytest.mark.parametrize("workers", [0, 1])
def test_set_epoch_reaches_persistent_workers(workers: int) -> None:
    data = Curriculum()
    inner = Subset(data, range(8))
    loader = pretended_rank().dataloader(inner, batch_size=8, num_workers=workers, persistent_workers=workers > 0)
    for epoch in range(3):
        data.set_epoch(epoch)
        (batch,) = loader
        assert torch.equal(batch, 100 * epoch + torch.arange(8))


def test_lengths_of_samples_that_are_no_more_are_refused() -> None:
    pool = Pool()
    loader = pretended_rank().dataloader(pool, batch_size=4, batching=BalancedBatches(lengths=[1] * 16))
    pool.items += [16]
    with pytest.raises(DataError, match="has 17 samples, but had 16 when the loader was made, and batching="):
        list(loader)
