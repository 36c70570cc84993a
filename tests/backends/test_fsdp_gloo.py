"""How shards communicate over gloo: the sums are those of a reduce-scatter, and no memory stays."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import unitrain

DTYPES = (torch.float32, torch.bfloat16)


def given(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(6, dtype=dtype) + 100 * rank


def sums() -> list[tuple[list[float], int]]:
    """Return this rank's sum of what each rank gives, as a unit's gradients are summed, and the bytes that it keeps."""
    found = []
    with unitrain.init(backend="fsdp", device="cpu", timeout_s=30) as strategy:
        model: Any = strategy.prepare(nn.Linear(3, 2))
        (group,) = model._get_fsdp_state()._fsdp_param_groups
        for dtype in DTYPES:
            own = given(strategy.rank, dtype)
            out = group._reduce_scatter_comm.allocate((2,), dtype=dtype, device=own.device)
            group._reduce_scatter_comm(out, own, dist.group.WORLD, dist.ReduceOp.SUM)
            found.append((out.tolist(), own.untyped_storage().nbytes()))
    return found


def test_each_rank_gets_its_part_of_the_sum_and_frees_what_it_gave() -> None:
    for rank, found in enumerate(run_ranks(sums, nprocs=3)):
        for dtype, (part, kept) in zip(DTYPES, found, strict=True):
            whole = torch.stack([given(one, dtype).float() for one in range(3)]).sum(0).to(dtype)
            assert part == whole[2 * rank : 2 * rank + 2].tolist()
            assert kept == 0
