"""The ranks compare some samples of a map-style dataset, in order to notice other data on one of them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch.utils.data import Dataset, IterableDataset

import unitrain


class Rows(Dataset[Any]):
    """Samples that are augmented at random, from the generators that the loader seeds."""

    def __init__(self, values: Any) -> None:
        self.values = list(values)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return {"row": self.values[index] + torch.rand(3), "flipped": random.random() < 0.5, "of": Rows}


class OwnGenerator(Rows):
    """Draws from a generator that nobody seeds."""

    def __getitem__(self, index: int) -> Any:
        return self.values[index] + np.random.default_rng().random()


class Opened(Rows):
    """Opens what it reads when it is first needed, which must be in a worker."""

    def __getitem__(self, index: int) -> Any:
        self.opened_by = os.getpid()
        return self.values[index]


class Files(IterableDataset[Any]):
    """Yields what is in its files, of which a loader gives each rank some."""

    def __init__(self, files: list[Any]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[Any]:
        for file in self.files:
            yield from file

    def shard(self, num_shards: int, index: int) -> Files:
        return Files(self.files[index::num_shards])


class Draws:
    """A file that another host does not have, or with samples that are drawn at random without a seed."""

    def __init__(self, *, exists: bool) -> None:
        self.exists = exists

    def __iter__(self) -> Iterator[Any]:
        if not self.exists:
            raise FileNotFoundError
        return iter(np.random.default_rng().random(4))


class Declared(Rows):
    fingerprint = "of whatever rank"


def first(samples: list[Any]) -> Any:
    return samples[0]


def with_other_data() -> None:
    with unitrain.init(device="cpu", timeout_s=20) as strategy:
        rank, world = strategy.rank, strategy.world_size
        turned = list(range(24))[::-1] if rank else list(range(24))
        others: list[Any] = [
            [float(i) for i in range(rank, 48, world)],
            np.arange(48.0)[rank::world],
            Rows(turned),
        ]
        for data in others:
            loader = strategy.dataloader(data, global_batch_size=4, shuffle=True, collate_fn=first)
            for _ in range(2):
                with pytest.raises(
                    unitrain.DataError, match=r"sample \d+ on rank 1 is another than on rank 0. Pass the"
                ):
                    next(iter(loader))
        with torch.no_grad(), pytest.raises(unitrain.DataError, match="is another than on rank 0"):
            list(strategy.dataloader(Rows(turned), batch_size=4, num_workers=1))

        files = [[10.0 * i + j for j in range(4)] for i in range(4)]
        for workers in (0, 1):
            with pytest.raises(unitrain.DataError, match="this Files begins with another sample on rank 1 than on"):
                next(iter(strategy.dataloader(Files(files[rank::world]), batch_size=2, num_workers=workers)))
        next(iter(strategy.dataloader(Files(files[rank::world]), batch_size=2, sharded=True)))  # the script's word
        for first_file in (files[0], Draws(exists=True), Draws(exists=not rank)):
            strategy.barrier()
            assert len(list(strategy.dataloader(Files([first_file, *files[1:]]), batch_size=2))) == 4

        alike: list[Any] = [Rows(range(24)), OwnGenerator(range(24)), Declared(turned), [object] * 24, [None]]
        for data in alike:
            loader = strategy.dataloader(data, global_batch_size=4, shuffle=True, collate_fn=first)
            state = random.getstate(), torch.get_rng_state()
            next(iter(loader), None)  # of one sample, only rank 0 has a batch
            assert random.getstate() == state[0]
            assert torch.equal(torch.get_rng_state(), state[1])

        opened = Opened(range(24))
        list(strategy.dataloader(opened, global_batch_size=4, num_workers=1))
        assert not hasattr(opened, "opened_by"), "nothing is opened in the process that forks workers"

        grown = [float(i) for i in range(24)]
        loader = strategy.dataloader(grown, global_batch_size=4)
        list(loader)
        grown[12:] = [float(rank)] * 20
        with pytest.raises(unitrain.DataError, match="is another than on rank 0"):
            list(loader)


def test_other_data_on_one_rank_are_an_error_on_all() -> None:
    run_ranks(with_other_data)
