"""Each case of Horovod's parallel PyTorch tests has Horovod's result, bit for bit: both run here, side by side."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from horovod_cases import CASES, TRAININGS, outcomes
from needs import HOROVOD
from ranks import run_ranks
from torch import Tensor, nn

from unitrain.errors import UsageError

REAL, OURS = "horovod.torch", "unitrain.compat.horovod"
# On three ranks, the even ones are a group, and more than two numbers are added. join() may return either of two ranks.
ON_THREE = [
    name
    for name in CASES
    if "set" in name or not ("grad" in name or "scale" in name or "join" in name or "fp16" in name)
]
NAMES = {2: list(CASES), 3: ON_THREE}
# The third factor, or term, may come in another order.
ROUNDED = {"allreduce_product", "force_allreduce", "optimizer_no_named_parameters", *TRAININGS}

pytestmark = HOROVOD

Results = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results() -> Results:
    """Return a function that runs all cases with a module on some ranks, the first time that it is asked to."""
    known: dict[tuple[str, int, str], list[dict[str, Any]] | Exception] = {}

    def run(module: str, nprocs: int, backend: str = "auto") -> list[dict[str, Any]]:
        key = module, nprocs, backend
        if key not in known:
            launcher: Any = "horovodrun" if module == REAL or backend == "horovod" else "spawn"
            try:
                known[key] = run_ranks(outcomes, *key[::2], NAMES[nprocs], nprocs=nprocs, launcher=launcher, timeout=90)
            except Exception as error:
                known[key] = error
        found = known[key]
        if isinstance(found, Exception):
            raise found
        return found

    return run


def assert_same(ours: Any, theirs: Any, exact: bool = True) -> None:
    """Assert that two results are equal, tensors bit for bit."""
    if isinstance(theirs, Tensor):
        rtol, atol = (0.0, 0.0) if exact else (1e-5, 1e-6)
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
    elif isinstance(theirs, dict):
        assert_same(list(ours.items()), list(theirs.items()), exact)
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other, exact)
    else:
        assert ours == theirs


@pytest.mark.slow("the first of each kind runs all cases, with Horovod too")
@pytest.mark.parametrize(
    ("name", "nprocs", "backend"),
    [
        pytest.param(name, nprocs, backend, marks=marks, id=f"{name}-{nprocs}-{backend}")
        for nprocs, backend, marks in (
            (2, "ddp", ()),
            (3, "ddp", ()),
            (2, "horovod", pytest.mark.all("the same calls on the other backend")),
        )
        for name in NAMES[nprocs]
    ],
)
def test_a_case_has_the_result_of_horovod(results: Results, name: str, nprocs: int, backend: str) -> None:
    for ours, theirs in zip(results(OURS, nprocs, backend), results(REAL, nprocs), strict=True):
        assert_same(ours[name], theirs[name], exact=nprocs == 2 or name not in ROUNDED)


def test_functions_have_the_parameters_of_horovod() -> None:
    theirs, ours = import_module(REAL), import_module(OURS)
    for name in sorted(vars(theirs)):
        value = getattr(theirs, name)
        if name.startswith("_") or inspect.ismodule(value) or name == "check_extension":  # of Horovod's build
            continue
        assert hasattr(ours, name), name
        if inspect.isfunction(value):
            parameters = [list(inspect.signature(function).parameters) for function in (getattr(ours, name), value)]
            assert parameters[0] == parameters[1] or "kwargs" in parameters[1], name


# ------------------------------------------------------------------------------------------ what differs from Horovod


def batch_norm() -> list[Tensor]:
    """Return outputs, gradients and statistics with a part of the batch, on a CPU."""
    hvd = import_module(OURS)
    hvd.init()
    x = batch()[hvd.rank() :: hvd.size()].requires_grad_()
    norm = hvd.SyncBatchNorm(3).double()
    out = norm(x)
    out.square().sum().backward()
    weight = hvd.allreduce(norm.weight.grad, op=hvd.Sum)
    hvd.shutdown()
    return [out.detach(), x.grad, norm.running_mean, norm.running_var, weight]


def batch() -> Tensor:
    return torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_batches_are_normalised_over_all_ranks_on_a_cpu() -> None:
    whole, norm = batch().requires_grad_(), nn.BatchNorm1d(3).double()
    out = norm(whole)
    out.square().sum().backward()
    assert whole.grad is not None
    for rank, (its, grad, *rest) in enumerate(run_ranks(batch_norm)):
        torch.testing.assert_close(its, out.detach()[rank::2], rtol=0, atol=1e-9)
        torch.testing.assert_close(grad, whole.grad[rank::2], rtol=0, atol=1e-9)
        for one, other in zip(rest, (norm.running_mean, norm.running_var, norm.weight.grad), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def in_another_order() -> list[Any]:
    """Start two operations in another order on each rank, then different ones."""
    hvd = import_module(OURS)
    hvd.init()
    names = ["a", "b"][:: 1 if hvd.rank() == 0 else -1]
    handles = {name: hvd.allreduce_async(torch.tensor([float(ord(name))]), name=name, op=hvd.Sum) for name in names}
    sums = [hvd.synchronize(handles[name]).item() for name in names]
    try:
        hvd.allreduce(torch.ones(2), name=f"of {hvd.rank()}")
    except hvd.HorovodInternalError as error:
        said = str(error)
    after = hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist()
    hvd.shutdown()
    return [names, sums, said, after]


def test_names_match_operations_and_those_without_a_match_are_named() -> None:
    for names, sums, said, after in run_ranks(in_another_order):
        assert sums == [2.0 * ord(name) for name in names]
        assert "of 0" in said
        assert "of 1" in said
        assert after == [2.0, 2.0]


def refusals() -> None:
    hvd = import_module(OURS)
    hvd.init()
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with pytest.raises(UsageError, match=r"Adasum.*Average"):
        hvd.allreduce(torch.ones(2), op=hvd.Adasum)
    with pytest.raises((UsageError, ValueError), match=r"Adasum.*Average"):
        hvd.DistributedOptimizer(optimizer, [("p", parameter)], op=hvd.Adasum)
    with pytest.raises(UsageError, match="profile"):
        hvd.start_timeline("timeline.json")
    hvd.shutdown()


def test_refusals_say_what_to_use() -> None:
    run_ranks(refusals, nprocs=1)
