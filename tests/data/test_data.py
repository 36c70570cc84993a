"""``strategy.dataloader``: its batches, and meters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pretended import pretended_rank
from torch.utils.data import DataLoader, Dataset, TensorDataset

import unitrain
from unitrain import Strategy


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


def test_a_meter_adds_single_numbers(strategy: Strategy) -> None:
    meter = strategy.meter()
    with pytest.raises(
        unitrain.UsageError, match=r"a tensor of shape \(3,\): pass mean=x\.mean\(\) or total=x\.sum\(\)"
    ):
        meter.add(mean=torch.ones(3), count=3)
    meter.add(mean=torch.tensor(2.0), count=3)
    assert (meter.value(), meter.count()) == (2.0, 3)


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
