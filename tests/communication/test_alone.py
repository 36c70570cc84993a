"""``Communicator.alone``: what collectives return without the other ranks, which are not in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from needs import HOROVOD
from ranks import run_ranks

import unitrain


def collectives(strategy: unitrain.Strategy) -> list[Any]:
    own = torch.tensor([1.0, float(strategy.rank)])
    gathered, rows = strategy.all_gather(own), strategy.gather((own, own[:1]))
    return [
        strategy.all_reduce(own).tolist(),
        strategy.all_reduce(own, "mean").tolist(),
        strategy.all_reduce(own, "max").tolist(),
        gathered.tolist(),
        [part.tolist() for part in rows],
        strategy.broadcast(own, src=1).tolist(),
        strategy.all_gather_object({"rank": strategy.rank}),
        strategy.broadcast_object(strategy.rank),
    ]


def alone(backend: str) -> tuple[list[Any], list[Any]]:
    with unitrain.init(backend=backend, device="cpu", timeout_s=20, debug=True) as strategy:
        inside: list[Any] = []
        if strategy.rank == 1:  # the others would be missing
            with strategy.communicator.alone():
                inside = collectives(strategy)
        return inside, collectives(strategy)


@pytest.mark.parametrize(
    ("backend", "launcher"), [("ddp", "spawn"), pytest.param("horovod", "horovodrun", marks=HOROVOD)]
)
def test_one_rank_gets_what_it_gives_from_all(backend: str, launcher: Any) -> None:
    (_, first), (inside, second) = run_ranks(alone, backend, launcher=launcher)
    own = [1.0, 1.0]
    assert inside == [[2, 2], own, own, [own, own], [[1] * 4, [1, 1]], own, [{"rank": 1}] * 2, 1]
    assert first == second
    assert first[:2] == [[2, 1], [1, 0.5]]
    assert first[-2:] == [[{"rank": 0}, {"rank": 1}], 0]
