"""What the strategy's own calls promise on all ranks, whatever the backend: refusals, meters, printing, the end."""

from __future__ import annotations

import contextlib
import io
import math
import pickle
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from gpu_waits import communicator_on_gpu
from needs import GPU
from ranks import run_ranks
from torch.nn.utils import parameters_to_vector

import unitrain
from unitrain import CheckpointError, Strategy, UsageError
from unitrain.communication.counts import CountReduction
from unitrain.testing.models import Net, Twins


def opened() -> Strategy:
    return unitrain.init(precision="fp64", device="cpu", timeout_s=30)


def refused_reductions(folder: Path) -> None:
    """Unsupported inputs raise UsageError on every rank, and later calls work."""
    with opened() as strategy:
        whole = torch.ones(1, dtype=torch.int32)
        for verb, arguments, message in [
            ("all_reduce", (torch.ones(1), "avg"), "sum, mean, max and min, not 'avg'"),
            ("all_reduce", (whole, "mean"), "pass tensor.float"),
            ("all_reduce", (torch.ones(1, dtype=torch.cfloat),), "view_as_real"),
            ("all_gather", (torch.eye(2).to_sparse(),), "to_dense"),
            ("all_reduce", (1.0,), r"torch\.tensor"),
            ("broadcast", (whole, strategy.world_size), "there is no rank"),
        ]:
            with pytest.raises(UsageError, match=message):
                getattr(strategy.communicator, verb)(*arguments)  # mypy would report these calls
        with pytest.raises(UsageError, match="there is no rank -1"):
            strategy.communicator.broadcast_object(1, -1)
        assert float(strategy.all_reduce(torch.ones(()))) == strategy.world_size


def refused_gathers(folder: Path) -> None:
    """Tensors of other shapes, then of other dtypes, are refused on all ranks; such as go together are stacked."""
    with opened() as strategy:
        shaped, typed = (
            torch.ones(3 + strategy.rank),
            torch.ones(2, dtype=[torch.float32, torch.float64][strategy.rank]),
        )
        for mine, said in (
            (shaped, r"but got float32\[3\] on rank 0; float32\[4\] on rank 1: pad, or"),
            (typed, r"but got float32\[2\] on rank 0; float64\[2\] on rank 1: pad, or"),
        ):
            with pytest.raises(UsageError, match=said):
                strategy.communicator.all_gather(mine)
        assert strategy.communicator.all_gather(torch.tensor(strategy.rank)).tolist() == [0, 1]


def narrow_dtypes(folder: Path) -> None:
    """Reduce ints whose sum their dtype can't hold, and gather complex numbers with gradients."""
    with opened() as strategy:
        assert strategy.all_reduce(torch.full((1,), 60_000, dtype=torch.float16), "mean").tolist() == [60_000]
        for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
            limits = torch.iinfo(dtype)
            low, high = torch.tensor([0, limits.min], dtype=dtype), torch.tensor([0, limits.max], dtype=dtype)
            own = [low, high][strategy.rank]
            assert strategy.all_reduce(own).tolist() == [0, limits.min + limits.max]
            assert strategy.all_reduce(high).tolist() == [0, 2 * limits.max]
            assert strategy.all_reduce(own, "max").dtype == dtype
        rows = torch.full((strategy.rank + 1, 2), 1 + 2j * (strategy.rank + 1), requires_grad=True)
        strategy.gather(rows, differentiable=True).abs().square().sum().backward()  # type: ignore[no-untyped-call]
        assert rows.grad is not None
        torch.testing.assert_close(rows.grad, 2 * 2 * rows.detach())  # the loss of each of two ranks


def counts(folder: Path) -> None:
    """Integers are reduced exactly, and booleans as integers."""
    with opened() as strategy:
        ranks, own = strategy.communicator, strategy.rank
        summed = CountReduction(ranks, "sum", "summed").start([own + 1, 2**40, True])
        largest = CountReduction(ranks, "max", "largest").start([own, -own, own == 0])
        assert (summed(), largest()) == ([3, 2**41, 2], [1, 0, 1])


def meters(folder: Path) -> None:
    """Sums and means are those over the samples of all ranks, which may differ in number or be missing on some."""
    with opened() as strategy:
        size = strategy.world_size
        meter = strategy.meter()
        assert math.isnan(meter.value())
        for count in range(strategy.rank + 1):  # uneven; the first is empty
            meter.add(total=torch.tensor(math.nan if count == 0 else 2.0 * count), count=count)
        counts = [sum(range(rank + 1)) for rank in range(size)]
        assert meter.count() == sum(counts)
        assert meter.sum() == 2 * sum(counts)
        assert meter.value() == 2.0 if size > 1 else math.isnan(meter.value())
        meter.reset()
        meter.add(total=1.5, count=3)
        assert meter.value() == 0.5


def prints_once(folder: Path) -> None:
    """strategy.print prints on rank 0, and nowhere else."""
    with opened() as strategy:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            strategy.print("once", strategy.rank, sep="-")
        assert printed.getvalue() == ("once-0\n" if strategy.is_main else "")


def refuses_to_save_or_load(folder: Path) -> None:
    """A file that can't be written or read is an error on every rank."""
    with opened() as strategy:
        file = folder / "file"
        strategy.save({"a": 1}, file)
        with pytest.raises(CheckpointError, match="does not exist"):
            strategy.load(folder / "none.pt")
        for value, place in (({"a": 1}, file / "below a file"), ({"code": lambda: None}, folder / "code.pt")):
            with pytest.raises(CheckpointError, match="could not be written"):
                strategy.save(value, place)
        if strategy.world_size > 1:
            model = strategy.prepare(Net())
            with pytest.raises(UsageError, match="modules on some ranks only"):
                strategy.save(model if strategy.is_main else None, file)


def nothing_after_close(folder: Path) -> None:
    """A closed strategy raises an error for calls that would otherwise act on one rank only."""
    with opened() as strategy:
        twins = Twins(strategy)
    before = parameters_to_vector(twins.model.parameters())
    with pytest.raises(UsageError, match=r"was called after strategy\.close\(\)"):
        strategy.step(twins.loss(), twins.optimizer)
    assert torch.equal(parameters_to_vector(twins.model.parameters()), before)
    if strategy.world_size > 1:
        with pytest.raises(UsageError, match=r"all_reduce was called after strategy\.close\(\)"):
            strategy.all_reduce(torch.ones(1))


ON_ANY_WORLD = [refused_reductions, meters, prints_once, refuses_to_save_or_load, nothing_after_close]


@pytest.mark.parametrize(
    ("promise", "nprocs"), [*product(ON_ANY_WORLD, (1, 2)), *product([counts, refused_gathers, narrow_dtypes], (2,))]
)
def test_a_promise_is_kept(promise: Callable[[Path], None], nprocs: int, tmp_path: Path) -> None:
    run_ranks(promise, tmp_path, nprocs=nprocs)


def test_what_communicates_can_not_be_pickled() -> None:
    with opened() as strategy:
        for value in (strategy.communicator, strategy):
            with pytest.raises(UsageError, match="can't be pickled"):
                pickle.dumps(value)


@pytest.mark.gpu
@GPU
def test_results_are_there_before_a_gpu_has_computed_what_was_queued() -> None:
    counts = CountReduction(communicator_on_gpu(), "sum", "counts")
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)  # type: ignore[no-untyped-call]  # cycles: half a second
    computed = torch.cuda.current_stream().record_event()
    assert counts.start([1, 2, 3])() == [1, 2, 3]
    assert not computed.query()
    torch.cuda.synchronize()
