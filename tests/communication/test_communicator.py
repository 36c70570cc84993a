"""Collectives that would be silently wrong, or fail on one rank only, raise an error on all ranks."""

from __future__ import annotations

import pickle

import pytest
import torch
from ranks import run_ranks

import unitrain
from unitrain import UsageError


def gather() -> list[str]:
    """Give tensors of other shapes, then of other dtypes, then such as go together."""
    with unitrain.init(backend="ddp", device="cpu", timeout_s=20) as strategy:
        said = []
        for mine in (torch.ones(3 + strategy.rank), torch.ones(2, dtype=[torch.float32, torch.float64][strategy.rank])):
            with pytest.raises(UsageError) as refused:
                strategy.all_gather(mine)
            said.append(str(refused.value))
        assert strategy.all_gather(torch.tensor(strategy.rank)).tolist() == [0, 1]
        return said


def test_tensors_that_can_not_be_stacked_are_refused_on_all_ranks() -> None:
    for shapes, dtypes in run_ranks(gather):
        assert "but got float32[3] on rank 0; float32[4] on rank 1: pad, or" in shapes
        assert "but got float32[2] on rank 0; float64[2] on rank 1: pad, or" in dtypes


def reduce() -> None:
    """Reduce numbers whose sum their dtype can't hold, and gather complex numbers with gradients."""
    with unitrain.init(backend="ddp", device="cpu", timeout_s=20) as strategy:
        assert strategy.all_reduce(torch.full((1,), 60_000, dtype=torch.float16), "mean").tolist() == [60_000]
        for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
            limits = torch.iinfo(dtype)
            low, high = torch.tensor([0, limits.min], dtype=dtype), torch.tensor([0, limits.max], dtype=dtype)
            own = [low, high][strategy.rank]
            assert strategy.all_reduce(own).tolist() == [0, limits.min + limits.max]
            assert strategy.all_reduce(own).dtype == dtype
            with pytest.raises(UsageError, match=f"not within .* to .* .{dtype}.: pass tensor.to"):
                strategy.all_reduce(high)
        rows = torch.full((strategy.rank + 1, 2), 1 + 2j * (strategy.rank + 1), requires_grad=True)
        strategy.gather(rows, differentiable=True).abs().square().sum().backward()  # type: ignore[no-untyped-call]
        assert rows.grad is not None
        torch.testing.assert_close(rows.grad, 2 * 2 * rows.detach())  # the loss of each of two ranks


def test_what_a_dtype_can_not_hold_is_reduced_in_a_wider_one_or_refused() -> None:
    run_ranks(reduce)


def test_what_communicates_can_not_be_pickled() -> None:
    with unitrain.init(backend="single") as strategy:
        with pytest.raises(UsageError, match="can't be pickled"):
            pickle.dumps(strategy.communicator)
        with pytest.raises(UsageError, match="can't be pickled"):
            pickle.dumps(strategy)
