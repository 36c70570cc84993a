"""Rows that ranks have updated reach all ranks, bit for bit, in messages that are no larger than they may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from needs import HOROVOD
from ranks import run_ranks
from torch import Tensor

import unitrain
from unitrain.communication.row_shards import rows_of
from unitrain.training.optimizers import row_gather
from unitrain.training.optimizers.row_gather import RowGather

WEIGHTS: list[tuple[Tensor, tuple[int, int, int]]] = [
    (torch.arange(35.0).reshape(7, 5), (3, 2, 2)),
    (torch.arange(3, dtype=torch.float64), (1, 1, 1)),
    (torch.arange(300.0).reshape(1, 300), (0, 1, 0)),
    (torch.arange(48.0, dtype=torch.bfloat16).reshape(2, 3, 4, 2).to(memory_format=torch.channels_last), (1, 0, 1)),
    (torch.arange(4).to(torch.cfloat), (2, 1, 1)),
    (torch.arange(1000.0).reshape(10, 100), (3, 3, 4)),
    # So large that they are gathered in place.
    (torch.arange(60000.0).reshape(100, 600), (40, 0, 60)),
    (torch.arange(160000).to(torch.bfloat16).reshape(2, 400, 200), (1, 1, 0)),
]


def gather(backend: str, limits: dict[str, int]) -> tuple[list[Tensor], list[int], list[int]]:
    """Start from weights of which this rank's rows are right only. Return all, and the bytes of each collective."""
    with unitrain.init(backend=backend, device="cpu", timeout_s=30) as strategy, pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(row_gather, name, limit)
        ranks = strategy.communicator
        held = []
        for weight, counts in WEIGHTS:
            mine = torch.full_like(weight, -1)
            rows_of(mine, counts, ranks.rank).copy_(rows_of(weight, counts, ranks.rank))
            held.append((mine, counts))
        packed: list[int] = []
        in_place: list[int] = []
        all_gather, gather_in_place = ranks.all_gather_async, ranks.gather_in_place_async

        def noted(tensor: Tensor, name: str) -> Any:
            packed.append(tensor.numel() * ranks.world_size)
            return all_gather(tensor, name)

        def noted_in_place(tensors: Any, name: str) -> Any:
            in_place.append(sum(whole.nbytes for whole, _ in tensors))
            return gather_in_place(tensors, name)

        ranks.all_gather_async, ranks.gather_in_place_async = noted, noted_in_place
        RowGather(ranks, held, "rows")()
        return [mine for mine, _ in held], packed, in_place


@pytest.mark.parametrize(
    ("backend", "launcher", "limits", "packed", "in_place"),
    [
        ("ddp", "spawn", {}, 4, [560_000]),
        ("ddp", "spawn", {"BUFFER_BYTES": 600, "IN_PLACE_BYTES": 500_000}, None, [240_000, 320_000]),
        pytest.param("horovod", "horovodrun", {"TOO_LARGE": 300_000}, 4, [240_000], marks=HOROVOD),
        pytest.param("horovod", "mpirun", {}, 4, [560_000], marks=[HOROVOD, pytest.mark.soak]),
    ],
)
def test_rows_reach_all_ranks(
    backend: str, launcher: Any, limits: dict[str, int], packed: int | None, in_place: list[int]
) -> None:
    for found, sizes, large in run_ranks(gather, backend, limits, nprocs=3, launcher=launcher):
        assert all(map(torch.equal, found, (weight for weight, _ in WEIGHTS)))
        assert max(sizes) <= limits.get("BUFFER_BYTES", row_gather.BUFFER_BYTES)
        assert packed is None or len(sizes) == packed, "one collective for each dtype"
        assert large == in_place
