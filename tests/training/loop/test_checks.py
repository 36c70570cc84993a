"""Warnings for ranks that train on the same samples and schedulers stepped twice; errors for ``optimizer.step()``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset

import unitrain
from unitrain.training.loop.checks import DirectStepCheck

PREPARED, OTHER = Parameter(torch.ones(1)), Parameter(torch.ones(1))


class Augmented(Dataset[Tensor]):
    """Data of a class that the library does not know, with random numbers in each sample."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2,), float(self.first + index)) + torch.rand(2)


class Stream(IterableDataset[Tensor]):
    """An iterable dataset that shuffles with the global generators, and may know the rank."""

    def __init__(self, of_rank: Callable[[], int] = lambda: 0) -> None:
        self.of_rank = of_rank

    def __iter__(self) -> Iterator[Tensor]:
        for index in torch.randperm(24):
            yield torch.full((2,), float(24 * self.of_rank() + int(index)))


def loaders(strategy: unitrain.Strategy) -> dict[str, Any]:
    rank, world = strategy.rank, strategy.world_size
    known = TensorDataset(torch.randn(24, 2, generator=torch.Generator().manual_seed(0)))
    own = torch.Generator().manual_seed(rank)
    return {
        "shuffled": DataLoader(known, 4, shuffle=True),
        "in order": DataLoader(known, 4),
        "unknown": DataLoader(Augmented(), 4, shuffle=True),
        "a part": DataLoader(Subset(known, range(rank, 24, world)), 4, shuffle=True),
        "an unknown part": DataLoader(Augmented(24 * rank), 4, shuffle=True),
        "a generator": DataLoader(known, 4, shuffle=True, generator=own),
        "a sampler": DataLoader(known, 4, sampler=DistributedSampler(known, world, rank)),
        "a stream": DataLoader(Stream(), 4),
        "a stream that knows its rank": DataLoader(Stream(of_rank=dist.get_rank), 4),
        "the strategy's stream": strategy.dataloader(Stream(), global_batch_size=8),
        "the strategy's": strategy.dataloader(known, global_batch_size=8, shuffle=True),
    }


def train_by(name: str) -> list[str]:
    with unitrain.init(backend="ddp") as strategy, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model, optimizer = strategy.prepare(model := nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in loaders(strategy)[name]:
            x = batch[0] if isinstance(batch, (list, tuple)) else batch
            strategy.step(model(x).mean(), optimizer)
    return [f"{one.filename}: {one.message}" for one in seen]


def train_by_each() -> dict[str, list[str]]:
    with unitrain.init(backend="ddp") as strategy:
        names = list(loaders(strategy))
    return {name: train_by(name) for name in names}


def test_a_data_loader_that_shards_nothing_is_warned_of_once() -> None:
    first, other = run_ranks(train_by_each)
    assert len(other) == 11
    assert not any(other.values())
    said = {name: messages for name, messages in first.items() if messages}
    assert list(said) == ["shuffled", "in order", "unknown", "a stream"]
    for [message] in said.values():
        assert message.startswith(f"{__file__}: each of 2 ranks trains on the whole dataset, by a torch DataLoader")


@pytest.fixture
def steps() -> Iterator[DirectStepCheck]:
    made = DirectStepCheck(lambda parameter: parameter is PREPARED)
    yield made
    made.close()


def test_other_optimizers_are_let_be_and_all_in_the_end(steps: DirectStepCheck) -> None:
    SGD([OTHER], lr=0.1).step()
    steps.close()
    SGD([PREPARED], lr=0.1).step()
