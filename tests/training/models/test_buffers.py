"""Buffers that a forward changes have rank 0's values on all ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from needs import HOROVOD
from ranks import on_ranks, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import unitrain
from unitrain.testing.models import step_by_hand


class Codebook(nn.Module):
    """Changes buffers in place, by assignment, and from a later step on."""

    mean: Tensor
    assigned: Tensor
    late: Tensor
    calls: Tensor
    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("assigned", torch.zeros(2))
        self.register_buffer("late", torch.zeros(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("constant", torch.ones(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
            self.assigned = self.assigned * 0.9 + x.mean(0)
            self.calls.add_(1)
            if self.calls > 4:
                self.late.add_(x.sum(0))
            self.scratch.copy_(x[0])
        out: Tensor = self.linear(x + self.mean + self.assigned + self.late)
        return out


def rows(rank: int, step: int) -> Tensor:
    return torch.randn(4, 2, generator=torch.Generator().manual_seed(10 * step + rank))


def train(backend: str, broadcast: bool, steps: int) -> dict[str, Any]:
    with unitrain.init(backend=backend, broadcast_buffers=broadcast, device="cpu", timeout_s=30) as strategy:
        torch.manual_seed(0)
        prepared, optimizer = strategy.prepare(model := Codebook(), torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(steps):
            strategy.step(prepared(rows(strategy.rank, step)).pow(2).mean(), optimizer)
        return {name: tensor.clone() for name, tensor in [*model.named_buffers(), *model.named_parameters()]}


def train_with_ddp(steps: int) -> dict[str, Any]:
    """Train with torch's own DDP, within a process group of the library's."""
    with unitrain.init(backend="ddp", device="cpu", timeout_s=30) as strategy:
        torch.manual_seed(0)
        wrapped = DistributedDataParallel(model := Codebook())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            step_by_hand(wrapped(rows(strategy.rank, step)).pow(2).mean(), optimizer)
        return {name: tensor.clone() for name, tensor in [*model.named_buffers(), *model.named_parameters()]}


@pytest.mark.parametrize("backend", ["ddp", pytest.param("horovod", marks=HOROVOD)])
def test_moving_buffers_are_rank_0_s(backend: str) -> None:
    first, second = run_ranks(train, backend, True, 8)
    for name in ("mean", "assigned", "late", "calls", "constant"):
        assert torch.equal(first[name], second[name]), name
    assert not torch.equal(first["scratch"], second["scratch"])


def test_the_training_is_that_of_ddp() -> None:
    """Up to the step in which a buffer moves for the first time, which is noticed one step later."""
    ours, theirs = run_ranks(train, "ddp", True, 4)[0], run_ranks(train_with_ddp, 4)[0]
    for name in ("mean", "assigned", "linear.weight", "linear.bias"):
        assert torch.allclose(ours[name], theirs[name], atol=1e-7), name


def test_they_are_each_rank_s_own_on_request() -> None:
    first, second = run_ranks(train, "ddp", False, 3)
    assert not torch.equal(first["mean"], second["mean"])
    assert torch.equal(first["linear.weight"], second["linear.weight"])


def train_one_after_the_other() -> list[dict[str, Any]]:
    with unitrain.init(backend="ddp", device="cpu", timeout_s=30) as strategy:
        torch.manual_seed(0)
        models = [Codebook(), Codebook()]
        for model in models:
            prepared, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for step in range(3):
                strategy.step(prepared(rows(strategy.rank, step)).pow(2).mean(), optimizer)
        return [dict(model.named_buffers()) for model in models]


def test_a_module_may_be_prepared_while_another_one_is_trained() -> None:
    for first, second in zip(*run_ranks(train_one_after_the_other), strict=True):
        for name in ("mean", "assigned", "calls"):
            assert torch.equal(first[name], second[name]), name


class Bank(nn.Module):
    """Buffers of other forms than dense, constant ones: None, empty, expanded, growing, on one rank, of inference."""

    rows: Tensor
    expanded: Tensor
    moved: Tensor
    inference: Tensor

    def __init__(self, *, fills: bool) -> None:
        super().__init__()
        self.fills = fills
        self.linear = nn.Linear(2, 2)
        self.register_buffer("lowest", None)
        self.register_buffer("rows", torch.empty(0, 2))
        self.register_buffer("last", torch.zeros(4, 2))
        self.register_buffer("expanded", torch.linspace(0, 1, 2).expand(3, 2))
        self.register_buffer("moved", torch.zeros(1).expand(3))
        with torch.inference_mode():
            self.register_buffer("inference", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.fills and len(self.rows) > 4:
                self.lowest = x.amin(0)
            self.rows = torch.cat([self.rows, x])[-10:]
            self.last = x * self.expanded[0]  # of another shape in the last, smaller batch
            self.moved = (self.moved[:1] + x.mean()).expand(3)
        with torch.inference_mode():
            self.inference = self.inference + x.detach().sum(0)
        out: Tensor = self.linear(x)
        return out


def fill_banks(backend: str) -> dict[str, Any]:
    with unitrain.init(backend=backend, device="cpu", timeout_s=30) as strategy:
        torch.manual_seed(0)
        model, optimizer = strategy.prepare(
            bank := Bank(fills=strategy.is_main), torch.optim.SGD(bank.parameters(), lr=0.1)
        )
        data = torch.randn(21, 2, generator=torch.Generator().manual_seed(1))
        for batch in strategy.dataloader(data, global_batch_size=8):  # of 4, 4, and 3 or 2 samples of a rank
            strategy.step(model(batch).pow(2).mean(), optimizer)
        own = list(batch.shape)
        return {"own": own, **{name: tensor.clone() for name, tensor in bank.named_buffers()}}


@pytest.mark.parametrize(
    "backend",
    [
        "ddp",
        pytest.param("horovod", marks=[HOROVOD, pytest.mark.all("the same core, and its collectives")]),
        pytest.param("fsdp", marks=pytest.mark.all("the same core")),
    ],
)
def test_buffers_of_any_form_are_rank_0_s(backend: str) -> None:
    first, second = run_ranks(fill_banks, backend)
    assert first.pop("own") != second.pop("own")
    assert first.keys() == second.keys() == {"lowest", "rows", "last", "expanded", "moved", "inference"}
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert len(first["rows"]) == 10


@on_ranks()
def test_statistics_of_instance_norm_are_those_of_all_samples() -> None:
    with unitrain.init(backend="ddp", device="cpu", timeout_s=30, precision="fp64") as strategy:
        torch.manual_seed(0)
        layers = nn.Conv1d(2, 3, 1), nn.InstanceNorm1d(3, track_running_stats=True), nn.Conv1d(3, 1, 1)
        model, whole = nn.Sequential(*layers).double(), nn.Sequential(*copy.deepcopy(layers)).double()
        data = torch.randn(16, 2, 5, generator=torch.Generator().manual_seed(1)).double()
        reference = torch.optim.SGD(whole.parameters(), lr=0.1)
        for start in range(0, 16, 4):
            step_by_hand(whole(data[start : start + 4]).pow(2).mean(), reference)
        prepared, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in strategy.dataloader(data, global_batch_size=4):
            strategy.step(prepared(batch).pow(2).mean(), optimizer)
        with strategy.evaluation(prepared):
            torch.testing.assert_close(prepared(data), whole.eval()(data), rtol=1e-9, atol=1e-12)
