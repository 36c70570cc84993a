"""Forwards that do more than compute, under the backend fsdp: change weights, or are differentiated twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import unitrain
from unitrain import UsageError


class Bounded(nn.Linear):
    """A linear layer that bounds the norm of its weights in its forward, as EEGNet's do."""

    def __init__(self, how: str) -> None:
        super().__init__(4, 8)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        bounded = self.weight.detach().renorm(p=2, dim=0, maxnorm=0.5)
        if self.how == "data":
            self.weight.data = bounded
        elif self.how == "in place":
            with torch.no_grad():
                self.weight.copy_(bounded)
        return super().forward(x)


class KeysThatFollow(nn.Module):
    """A model that moves weights in its forward towards others, as MoCo's key encoder; each is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 8), nn.Linear(4, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        with torch.no_grad():
            self.key.weight.mul_(0.5).add_(self.query.weight, alpha=0.5)
        product: Tensor = query * self.key(x)
        return product


def data() -> TensorDataset:
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x.square())


def losses_of(strategy: unitrain.Strategy, model: nn.Module, penalty: bool = False) -> list[float]:
    model, optimizer = strategy.prepare(model, SGD((p for p in model.parameters() if p.requires_grad), lr=0.005))
    losses = []
    loader = strategy.dataloader(data(), global_batch_size=6)
    for _ in loader.epochs(2):
        for x, y in loader:
            x.requires_grad_(penalty)
            loss = (model(x).sum(1) - y.sum(1)).square().mean()
            if penalty:
                (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
                loss = loss + slope.square().sum(1).mean()
            mean = strategy.meter()
            mean.add(mean=loss, count=len(x))
            losses.append(mean.value())
            strategy.step(loss, optimizer)
    return losses


def distil(strategy: unitrain.Strategy) -> list[float]:
    student, teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    student, teacher, optimizer = strategy.prepare(student, teacher, SGD(student.parameters(), lr=0.1))
    losses = []
    for _ in range(3):
        x = torch.ones(2, 4, dtype=torch.float64) * (strategy.rank + 1 if strategy.world_size > 1 else 1.5)
        loss = (student(x) - teacher(x)).mean()  # its mean over the ranks is that of the mean x
        losses.append((strategy.all_reduce(loss.detach()) / strategy.world_size).item())
        strategy.step(loss, optimizer)
        with torch.no_grad():
            for weight, average in zip(student.parameters(), teacher.parameters(), strict=True):
                average.mul_(0.5).add_(weight, alpha=0.5)
    return losses


def net(how: str = "") -> nn.Module:
    return nn.Sequential(Bounded(how), nn.Tanh(), nn.Linear(8, 4))


def train_what_works(backend: str, sizes: int | None, keep: bool) -> list[list[float]]:
    settings: dict[str, Any] = {}
    if backend == "fsdp":
        settings["fsdp"] = {"wrap": sizes, "reshard_after_forward": not keep, "reshard_after_backward": False}
    with unitrain.init(backend=backend, precision="fp64", device="cpu", timeout_s=60, **settings) as strategy:
        found = [losses_of(strategy, net(), penalty=True), distil(strategy)]
        return found if keep else [*found, losses_of(strategy, KeysThatFollow())]


@pytest.mark.parametrize("keep", [False, True])
def test_parents_that_change_units_gradient_penalties_and_teachers_train_as_in_one_process(keep: bool) -> None:
    (alone,) = run_ranks(train_what_works, "single", None, keep, nprocs=1)
    for found in run_ranks(train_what_works, "fsdp", 16, keep):
        for losses, expected in zip(found, alone, strict=True):
            assert losses == pytest.approx(expected, abs=1e-9)


def train_what_is_refused() -> None:
    with unitrain.init(backend="fsdp", device="cpu", precision="fp64", timeout_s=60) as strategy:
        for how in ("data", "in place"):
            with pytest.raises(UsageError, match=r"changed (0\.)?weight, but under fsdp.*after strategy\.step"):
                losses_of(strategy, net(how))
        model = net()
        model, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.1))
        x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        with pytest.raises(UsageError, match=r"set fsdp\.reshard_after_backward to false"):
            strategy.backward(slope.square().sum(), optimizer)


def test_what_would_be_lost_or_is_freed_is_refused() -> None:
    run_ranks(train_what_is_refused)
