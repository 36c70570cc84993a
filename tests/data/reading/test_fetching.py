"""Reading and collating the samples of a batch, with a seed for each sample."""

from __future__ import annotations

import random
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from unitrain.data.reading.fetching import BatchReader, Request
from unitrain.rng import sample_seeds, seed_all


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


def test_without_seeds_all_draw_from_the_process() -> None:
    reader = BatchReader(Draws(), collate_and_draw)
    seed_all(1)
    batch = reader.__getitems__(Request([3, 1], None))
    drawn = [*batch["samples"], *batch["drawn"]]
    seed_all(1)
    expected = [random.random(), random.random(), random.random(), np.random.beta(1, 1), float(torch.rand(()))]
    assert drawn == expected


def test_wrong_indices_say_what_the_dataset_says() -> None:
    dataset: TensorDataset = TensorDataset(torch.arange(5))
    with pytest.raises(IndexError) as its:
        dataset[7]
    with pytest.raises(IndexError) as ours:
        BatchReader(dataset, default_collate).__getitems__(request(1, 7))
    assert str(ours.value) == str(its.value)
    last: list[Tensor] = BatchReader(dataset, default_collate).__getitems__(request(-1))
    assert last[0].tolist() == [4]
