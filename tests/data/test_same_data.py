"""The ranks compare some samples of a map-style dataset, in order to notice other data on one of them."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch.utils.data import Dataset

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
