"""Duties of the collectives that scripts call, on tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from unitrain.testing.duty import duty, several_processes
from unitrain.testing.models import differing_ranks
from unitrain.testing.worlds import World

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64,
)  # fmt: skip


def _contributions(dtype: torch.dtype, rank: int) -> Iterator[Tensor]:
    """Yield a rank's inputs: matrices, scalars, empty and non-contiguous tensors.

    The numbers are integers below 7, so that every sum is exact in every dtype.

    Args:
        dtype: the dtype of the inputs.
        rank: each rank has other numbers.
    """
    base = (torch.arange(6).reshape(2, 3) * (rank + 1) + rank) % 7
    if dtype == torch.bool:
        base = base % 3 == 0
    yield base.to(dtype)
    yield base.to(dtype)[1, 2]
    yield base.to(dtype)[:0]
    yield base.to(dtype).t()
    yield base.to(dtype)[:, ::2]
    yield base.to(dtype).reshape(1, 2, 1, 3)


def _reduced(op: str, stacked: Tensor) -> Tensor:
    """Return the expected result of a reduction over the first dimension, computed on one device.

    Args:
        op: sum, mean, max or min.
        stacked: the inputs of all ranks.
    """
    if op in ("max", "min"):
        return stacked.amax(0) if op == "max" else stacked.amin(0)
    if not stacked.is_floating_point():
        return stacked.sum(0)
    total = stacked.to(torch.float64).sum(0)
    return (total / len(stacked) if op == "mean" else total).to(stacked.dtype)


def _assert_equal(result: Tensor, expected: Tensor, name: str) -> None:
    """Assert that two tensors are equal, with the same dtype and shape. NaNs are not."""
    torch.testing.assert_close(result, expected, rtol=0, atol=0, msg=lambda said: f"{name}: {said}")


@duty()
def reductions(world: World) -> None:
    """all_reduce is exact for every operation, dtype and shape, and does not change its input."""
    with world.open() as strategy:
        for dtype in DTYPES:
            by_rank = [list(_contributions(dtype, rank)) for rank in range(strategy.world_size)]
            for case, op in itertools.product(range(len(by_rank[0])), ("sum", "mean", "max", "min")):
                if op == "mean" and not dtype.is_floating_point:
                    continue
                mine = by_rank[strategy.rank][case]
                copy = mine.clone()
                result = strategy.all_reduce(mine, op)  # type: ignore[arg-type]
                name = f"{op} of {dtype}{list(mine.shape)}"
                _assert_equal(result, _reduced(op, torch.stack([given[case] for given in by_rank])), name)
                _assert_equal(mine, copy, f"the input of {name}")
                # A view of the input would change when the script changes the input in place.
                assert result.data_ptr() != mine.data_ptr() or not mine.numel(), name


@duty()
def gathers_and_broadcasts(world: World) -> None:
    """all_gather stacks in rank order, and broadcast returns the source's tensor, for every dtype and shape."""
    with world.open() as strategy:
        for dtype in DTYPES:
            by_rank = [list(_contributions(dtype, rank)) for rank in range(strategy.world_size)]
            for case, mine in enumerate(by_rank[strategy.rank]):
                expected = torch.stack([given[case] for given in by_rank])
                name = f"{dtype}{list(mine.shape)}"
                _assert_equal(strategy.communicator.all_gather(mine), expected, f"all_gather of {name}")
                # Every rank in turn, since a backend may only ever have been tried with rank 0.
                for src in range(strategy.world_size):
                    _assert_equal(
                        strategy.communicator.broadcast(mine, src),
                        expected[src],
                        f"broadcast of {name} from rank {src}",
                    )
                _assert_equal(mine, list(_contributions(dtype, strategy.rank))[case], f"the input {name}")


@duty(needs=several_processes)
def same_bits_on_all_ranks(world: World) -> None:
    """A rounded sum is equal on all ranks, bit for bit, whatever its size."""
    with world.open() as strategy:
        generator = torch.Generator().manual_seed(strategy.rank)
        for dtype, size in itertools.product((torch.float16, torch.bfloat16, torch.float32), (1, 7, 1000, 100_003)):
            total = strategy.all_reduce(torch.randn(size, generator=generator).to(dtype))
            differing = differing_ranks(strategy, total)
            assert not differing, f"the sum of {dtype}[{size}] on ranks {differing} differs from that on rank 0"


@duty()
def nan_in_reductions(world: World) -> None:
    """Sums and means with NaN are NaN on all ranks; maxima and minima with NaN are at least the same on all ranks."""
    with world.open() as strategy:
        for dtype, bad_rank in itertools.product(
            (torch.float16, torch.bfloat16, torch.float32, torch.float64), range(strategy.world_size)
        ):
            mine = torch.full((64,), float(strategy.rank), dtype=dtype)
            if strategy.rank == bad_rank:
                mine[::2] = math.nan
            for op in ("sum", "mean"):
                is_nan = strategy.all_reduce(mine, op).isnan()
                assert is_nan.tolist() == [True, False] * 32, f"{op} of {dtype} with NaN on rank {bad_rank}"
            for op in ("max", "min"):
                reduced = strategy.all_reduce(mine, op)  # type: ignore[arg-type]
                everyone = strategy.communicator.all_gather(reduced.double().nan_to_num(-1.0))
                assert torch.equal(everyone, everyone[:1].expand_as(everyone)), f"{op} of {dtype} differs between ranks"
