"""What the strategy's own calls promise on all ranks, whatever the backend: refusals, meters, printing, the end."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.nn.utils import parameters_to_vector

import unitrain
from unitrain import CheckpointError, Strategy, UsageError
from unitrain.testing.models import Net, Twins


def opened() -> Strategy:
    return unitrain.init(precision="fp64", device="cpu", timeout_s=30)


def refused_reductions(folder: Path) -> None:
    """Unsupported inputs raise UsageError on every rank, and later calls work."""
    with opened() as strategy:
        whole = torch.ones(1, dtype=torch.int32)
        verbs: Any = strategy  # mypy would report these calls
        for verb, arguments, message in [
            ("all_reduce", (torch.ones(1), "avg"), "sum, mean, max and min, not 'avg'"),
            ("all_reduce", (whole, "mean"), "pass tensor.float"),
            ("all_reduce", (torch.ones(1, dtype=torch.cfloat),), "view_as_real"),
            ("all_gather", (torch.eye(2).to_sparse(),), "to_dense"),
            ("all_reduce", (1.0,), r"torch\.tensor"),
            ("broadcast", (whole, strategy.world_size), "there is no rank"),
        ]:
            with pytest.raises(UsageError, match=message):
                getattr(verbs, verb)(*arguments)
        with pytest.raises(UsageError, match="there is no rank -1"):
            strategy.communicator.broadcast_object(1, -1)
        assert float(strategy.all_reduce(torch.ones(()))) == strategy.world_size


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


@pytest.mark.parametrize("nprocs", [1, 2])
@pytest.mark.parametrize(
    "promise", [refused_reductions, meters, prints_once, refuses_to_save_or_load, nothing_after_close]
)
def test_a_promise_is_kept(promise: Callable[[Path], None], nprocs: int, tmp_path: Path) -> None:
    run_ranks(promise, tmp_path, nprocs=nprocs)
