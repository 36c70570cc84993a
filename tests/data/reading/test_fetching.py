"""Reading and collating the samples of a batch, with a seed for each sample."""

from __future__ import annotations

import random
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from unitrain.data.reading.fetching import BatchReader, Request
from unitrain.rng import sample_seeds


class Draws(Dataset[float]):
    """A sample is a number of python's generator."""

    def __getitem__(self, index: int) -> float:
        return random.random()


def request(*samples: int) -> Request:
    return Request(list(samples), sample_seeds(0, 0, np.array(samples)))


def collate_and_draw(samples: list[Any]) -> dict[str, Any]:
    """As mixing images does, say."""
    return {"samples": samples, "drawn": (random.random(), float(np.random.beta(1, 1)), float(torch.rand(())))}


STILL: dict[str, Any] = {
    "list": [10, 11, 12, 13, 14],
    "rows": TensorDataset(torch.arange(10, 15)),
    "part": Subset(TensorDataset(torch.arange(20)), range(10, 15)),
    "table": datasets.Dataset.from_dict({"x": [10, 11, 12, 13, 14]}),
}


@pytest.mark.parametrize("name", [*STILL, "draws"])
def test_a_collate_function_draws_by_its_batch_s_first_sample(name: str) -> None:
    """Whichever was read before, and whatever the process has drawn."""
    dataset = STILL.get(name, Draws())
    reader = BatchReader(dataset, collate_and_draw)
    one, other, again = (reader.__getitems__(request(*samples)) for samples in ([3, 1], [1, 3], [3, 2, 4]))
    assert one["drawn"] == again["drawn"]
    assert type(one["samples"]) is list
    assert name == "draws" or one["samples"] == [dataset[3], dataset[1]]
    assert not set(one["drawn"]) & set(other["drawn"])
    random.seed(5)
    assert BatchReader(dataset, collate_and_draw).__getitems__(request(3, 1)) == one
    if name == "draws":
        assert not set(one["drawn"]) & set(one["samples"])
