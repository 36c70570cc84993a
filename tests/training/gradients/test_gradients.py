"""Gradient buckets: sums and the time of sending, on two ranks; how buckets are made, on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor
from torch.nn import Parameter

from unitrain import UsageError
from unitrain.communication.collectives import Collectives
from unitrain.training.gradients.gradients import GradientReducer


class Sums:
    """Sums of torch.distributed; where there is no group, a world of one. Notes the names of what is sent."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.dtypes: list[torch.dtype] = []

    def all_reduce_async(self, tensor: Tensor, op: str, name: str) -> Callable[[], Any]:
        self.sent.append(name)
        self.dtypes.append(tensor.dtype)
        if not dist.is_initialized():
            return lambda: None
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        return work.wait


def reducer_of(*parameters: Parameter, **settings: Any) -> tuple[GradientReducer, Sums]:
    sums = Sums()
    given = {"armed": lambda parameter: True, "name": "g", **settings}
    return GradientReducer(parameters, cast(Collectives, sums), **given), sums


def ones(*shape: int, dtype: torch.dtype = torch.float64) -> Parameter:
    return Parameter(torch.ones(shape, dtype=dtype))


@on_ranks()
def test_gradients_are_summed_over_the_ranks() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    one, other, nobodys = ones(3), ones(2), ones(4)
    reducer, sums = reducer_of(one, other, nobodys, bucket_mb=1e-9)
    loss = (one * (rank + 1)).sum()
    (loss + 5 * other.sum() if rank == 1 else loss).backward()  # type: ignore[no-untyped-call]
    reducer.finish()
    assert one.grad is not None
    assert one.grad.tolist() == [3, 3, 3]
    assert other.grad is not None, "another rank used it"
    assert other.grad.tolist() == [5, 5]
    assert nobodys.grad is None, "weight decay leaves it alone, as on one device"
    assert sums.sent == ["g.0", "g.1", "g.2"], "in one order on all ranks, whatever they used"

    image = Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
    whole = Parameter(torch.ones(2, dtype=torch.complex64))
    reducer, _ = reducer_of(image, whole)
    ((rank + 1) * image.sum() + (whole * complex(0, rank + 1)).real.sum()).backward()  # type: ignore[no-untyped-call]
    reducer.finish()
    assert image.grad is not None
    assert image.grad.stride() == image.stride()
    assert torch.equal(image.grad, torch.full_like(image, 3))
    assert whole.grad is not None
    assert whole.grad.tolist() == [complex(0, -3)] * 2

    coarse = ones(1, dtype=torch.float32)
    reducer, sums = reducer_of(coarse, wire_dtype=torch.bfloat16)
    (coarse * (1 + 2**-10)).sum().backward()  # type: ignore[no-untyped-call]
    reducer.finish()
    assert coarse.grad is not None
    assert (coarse.grad.item(), coarse.grad.dtype, sums.dtypes) == (2.0, torch.float32, [torch.bfloat16])
    dist.destroy_process_group()


@pytest.mark.parametrize(("overlap", "sent"), [(True, ["g.0", "g.1"]), (False, [])])
def test_full_buckets_are_sent_while_backward_runs_where_that_is_wanted(overlap: bool, sent: list[str]) -> None:
    first, last = ones(1), ones(1)
    reducer, sums = reducer_of(first, last, bucket_mb=1e-9)
    reducer.overlap = overlap
    (first * last).sum().backward()  # type: ignore[no-untyped-call]
    assert sums.sent == sent
    reducer.finish()
    assert sums.sent == ["g.0", "g.1"]


def test_a_gradient_after_its_bucket_was_sent_is_refused() -> None:
    weight = ones(1)
    reducer_of(weight)
    weight.sum().backward()  # type: ignore[no-untyped-call]
    with pytest.raises(UsageError, match="after its bucket had been reduced: either a second backward"):
        weight.sum().backward()  # type: ignore[no-untyped-call]
