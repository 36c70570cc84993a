"""The requests for each micro-batch: samples and their seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from unitrain.data.order.samplers import Orders
from unitrain.data.order.sharding import EpochPlan
from unitrain.data.reading import map_style
from unitrain.data.reading.fetching import Request
from unitrain.data.reading.map_style import MapStyle, requests

SAMPLES = 23


def orders(rank: int = 0, world_size: int = 1, global_batch: int = 4) -> Orders:
    return Orders(
        EpochPlan(
            samples=SAMPLES, global_batch=global_batch, accumulate=1, rank=rank, world_size=world_size, drop_last=False
        ),
        shuffle=True,
    )


def asked(orders: Orders, seed: int | None = 0, number: int = 0) -> list[Request]:
    """Return what is asked for in an epoch, without stand-ins."""
    epoch = orders.epoch(0, number, 0)
    pairs = zip(epoch.plan, requests(epoch, epoch.plan, seed, number), strict=True)
    return [request for micro_batch, request in pairs if micro_batch.count]


def seeds_of(found: list[Request]) -> dict[int, int]:
    """Return the seed of each sample that is asked for."""
    return {sample: seed for one in found for sample, seed in zip(one.samples, one.seeds or [], strict=True)}


def test_a_sample_s_seed_is_its_own() -> None:
    alone = seeds_of(asked(orders()))
    assert sorted(alone) == list(range(SAMPLES))
    assert len(set(alone.values())) == SAMPLES
    for world_size in (2, 5):
        parts = [seeds_of(asked(orders(rank, world_size))) for rank in range(world_size)]
        assert {sample: seed for part in parts for sample, seed in part.items()} == alone
        assert sum(map(len, parts)) == SAMPLES
    assert not set(alone.values()) & set(seeds_of(asked(orders(), number=1)).values())
    assert not set(alone.values()) & set(seeds_of(asked(orders(), seed=1)).values())


def test_a_sample_that_comes_twice_has_two_seeds() -> None:
    plan = EpochPlan(samples=4, global_batch=2, accumulate=1, rank=0, world_size=1, drop_last=False)
    found = asked(Orders(plan, sampler=[3, 1, 3, 3], most=4))
    assert [one.samples for one in found] == [[3, 1], [3, 3]]
    assert len({seed for one in found for seed in one.seeds or []}) == 4


def test_without_seeds() -> None:
    assert all(one.seeds is None for one in asked(orders(), seed=None))


def test_a_stand_in_is_the_first_sample_of_the_global_batch() -> None:
    epochs = [orders(rank, 4).epoch(0, 0, 0) for rank in range(4)]
    ranks = [list(requests(epoch, epoch.plan, 0, 0))[-1] for epoch in epochs]  # 23 = 5 * 4 + 3
    assert ranks[3] == ranks[0]
    assert len(ranks[3].samples) == 1


def test_looking_up_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = asked(orders())
    monkeypatch.setattr(map_style, "_LOOK_UP", 9)
    assert asked(orders()) == whole


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seeded", [True, False])
def test_rows_are_those_of_a_bare_loader(workers: int, seeded: bool) -> None:
    dataset = Subset(TensorDataset(torch.randn(2 * SAMPLES, 3), torch.arange(2 * SAMPLES)), range(1, 2 * SAMPLES, 2))
    plan = EpochPlan(samples=SAMPLES, global_batch=4, accumulate=1, rank=0, world_size=1, drop_last=False)
    settings: dict[str, Any] = {"num_workers": workers}
    source = MapStyle(
        dataset, Orders(plan, shuffle=False), torch.utils.data.default_collate, seeded=seeded, settings=settings
    )
    ours = [batch for _, batch in source.batches(0, 0, 0, 0)]
    bare = list(DataLoader(dataset, 4, **settings))
    for mine, its in zip(ours, bare, strict=True):
        assert type(mine) is type(its)
        for part, other in zip(mine, its, strict=True):
            assert (part.dtype, part.stride()) == (other.dtype, other.stride())
            assert np.array_equal(part, other)
