"""The requests for each micro-batch: samples and their seeds."""

from __future__ import annotations

import pytest

from unitrain.data.order.samplers import Orders
from unitrain.data.order.sharding import EpochPlan
from unitrain.data.reading import map_style
from unitrain.data.reading.fetching import Request
from unitrain.data.reading.map_style import requests

SAMPLES = 23


def orders(rank: int = 0, world_size: int = 1, global_batch: int = 4) -> Orders:
    return Orders(
        EpochPlan(
            samples=SAMPLES, global_batch=global_batch, accumulate=1, rank=rank, world_size=world_size, drop_last=False
        ),
        lambda: SAMPLES,
        shuffle=True,
    )


def asked(orders: Orders, seed: int | None = 0, number: int = 0) -> list[Request]:
    """Return what is asked for in an epoch, without stand-ins."""
    epoch = orders.epoch(0, number, 0)
    pairs = zip(epoch.plan, requests(epoch, epoch.plan, seed, number), strict=True)
    return [request for micro_batch, request in pairs if micro_batch.count]


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
