"""Rows that ranks have updated reach all ranks, bit for bit, in buffers that are no larger than they may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

import unitrain
from unitrain.row_shards import rows_of
from unitrain.training.row_gather import RowGather

WEIGHTS: list[tuple[Tensor, tuple[int, int, int]]] = [
    (torch.arange(35.0).reshape(7, 5), (3, 2, 2)),
    (torch.arange(3, dtype=torch.float64), (1, 1, 1)),
    (torch.arange(300.0).reshape(1, 300), (0, 1, 0)),
    (torch.arange(48.0, dtype=torch.bfloat16).reshape(2, 3, 4, 2).to(memory_format=torch.channels_last), (1, 0, 1)),
    (torch.arange(4).to(torch.cfloat), (2, 1, 1)),
    (torch.arange(1000.0).reshape(10, 100), (3, 3, 4)),
    (torch.arange(60000.0).reshape(100, 600), (40, 0, 60)),  # so large that it is gathered in place
]


def gather(buffer_bytes: int) -> tuple[list[Tensor], list[int]]:
    """Start from weights of which this rank's rows are right only. Return all, and the sizes that were sent."""
    with unitrain.init(backend="ddp", device="cpu", timeout_s=30) as strategy:
        ranks = strategy.communicator
        held = []
        for weight, counts in WEIGHTS:
            mine = torch.full_like(weight, -1)
            rows_of(mine, counts, ranks.rank).copy_(rows_of(weight, counts, ranks.rank))
            held.append((mine, counts))
        sizes: list[int] = []
        all_gather = ranks.all_gather_async

        def noted(tensor: Tensor, name: str) -> Any:
            sizes.append(tensor.numel() * ranks.world_size)
            return all_gather(tensor, name)

        ranks.all_gather_async = noted
        RowGather(ranks, held, "rows", buffer_bytes)()
        return [mine for mine, _ in held], sizes


@pytest.mark.parametrize(("buffer_bytes", "most"), [(10**6, 4), (600, None)])
def test_rows_reach_all_ranks(buffer_bytes: int, most: int | None) -> None:
    for found, sizes in run_ranks(gather, buffer_bytes, nprocs=3):
        assert all(map(torch.equal, found, (weight for weight, _ in WEIGHTS)))
        assert max(sizes) <= buffer_bytes
        assert most is None or len(sizes) == most, "one collective for each dtype"
