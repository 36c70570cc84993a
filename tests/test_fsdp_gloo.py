"""How shards communicate over gloo: the sums are those of a reduce-scatter, and no memory stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import unitrain


def sums(dtype: torch.dtype) -> tuple[list[float], int]:
    """Return this rank's sum of what each rank gives, as the backend sums a unit, and the bytes of the input then."""
    with unitrain.init(backend="fsdp", device="cpu", timeout_s=30) as strategy:
        model: Any = strategy.prepare(nn.Linear(3, 2))
        (group,) = model._get_fsdp_state()._fsdp_param_groups
        size = 2 * strategy.world_size
        given = torch.arange(size, dtype=dtype) + 100 * strategy.rank
        out = group._reduce_scatter_comm.allocate((2,), dtype=dtype, device=torch.device("cpu"))
        group._reduce_scatter_comm(out, given, dist.group.WORLD, dist.ReduceOp.SUM)
        return out.tolist(), given.untyped_storage().nbytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_gets_its_part_of_the_sum_and_frees_what_it_gave(dtype: torch.dtype) -> None:
    for rank, (found, bytes_left) in enumerate(run_ranks(sums, dtype, nprocs=3)):
        whole = (3 * torch.arange(6, dtype=torch.float32) + 300).to(dtype)
        assert found == whole[2 * rank : 2 * rank + 2].tolist()
        assert bytes_left == 0
