"""Parameters that ranks have updated reach all ranks, bit for bit, in few calls."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from needs import HOROVOD
from ranks import run_ranks
from torch import Tensor
from torch.nn import Parameter

import unitrain
from unitrain.features.sharded_optimizer import exchange
from unitrain.features.sharded_optimizer.exchange import Exchange

SMALL: list[tuple[Tensor, int]] = [
    (torch.arange(35.0).reshape(7, 5), 0),
    (torch.arange(3, dtype=torch.float64), 1),
    (torch.arange(48.0, dtype=torch.bfloat16).reshape(2, 3, 4, 2).to(memory_format=torch.channels_last), 2),
    (torch.arange(4).to(torch.cfloat), 2),
    (torch.arange(12.0).reshape(3, 4).t(), 1),
    (torch.arange(12.0)[::2], 1),
    (torch.tensor(5.0), 2),
    (torch.empty(0, 3), 2),
    (torch.arange(1000.0).reshape(10, 100), 1),
]
LARGE: list[tuple[Tensor, int]] = [
    (torch.arange(300_000.0).reshape(300, 1000), 1),
    (torch.arange(600_000).to(torch.bfloat16).reshape(2, 500, 600).transpose(0, 1), 2),
]


def send(backend: str, which: str, limits: dict[str, int]) -> tuple[list[Tensor], list[int]]:
    """Start from parameters of which this rank's are right only. Return all, and the sizes of the calls."""
    parameters = {"small": SMALL, "large": LARGE, "both": [*SMALL, *LARGE]}[which]
    with unitrain.init(backend=backend, device="cpu", timeout_s=30) as strategy, pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(exchange, name, limit)
        ranks = strategy.communicator
        owned: list[list[Tensor]] = [[] for _ in range(ranks.world_size)]
        found = []
        for value, owner in parameters:
            found.append(Parameter(value.clone() if owner == ranks.rank else torch.full_like(value, -1)))
            owned[owner].append(found[-1])
        calls = Mock(side_effect=ranks.collectives.broadcast_async)
        patch.setattr(ranks.collectives, "broadcast_async", calls)
        sent = Exchange(ranks, owned, "parameters")
        sent()
        for p, (_, owner) in zip(found, parameters, strict=True):
            if owner != ranks.rank:
                p.data = torch.full_like(p, -2).clone()  # in other memory
        calls.reset_mock()
        sent()
        return [p.detach() for p in found], [given[0].numel() for given, _ in calls.call_args_list]


@pytest.mark.parametrize(
    ("backend", "launcher", "which", "limits", "calls"),
    [
        ("ddp", "spawn", "small", {}, [140, 24, 4072, 96, 32, 4]),
        ("ddp", "spawn", "large", {}, [1_200_000, 1_200_000]),
        ("ddp", "spawn", "large", {"PIECE_BYTES": 700_000}, [700_000, 500_000] * 2),
        pytest.param("horovod", "horovodrun", "both", {"PIECE_BYTES": 700_000}, [], marks=HOROVOD),
        pytest.param("horovod", "mpirun", "both", {}, [], marks=[HOROVOD, pytest.mark.soak]),
    ],
)
def test_parameters_reach_all_ranks(
    backend: str, launcher: Any, which: str, limits: dict[str, int], calls: list[int]
) -> None:
    expected = {"small": SMALL, "large": LARGE, "both": [*SMALL, *LARGE]}[which]
    for found, made in run_ranks(send, backend, which, limits, nprocs=3, launcher=launcher):
        assert all(map(torch.equal, found, (value for value, _ in expected)))
        assert made[: len(calls)] == calls
