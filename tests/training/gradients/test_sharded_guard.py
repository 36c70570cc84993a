"""``ShardedGuardedStep`` decides, clips and steps on every rank as ``GuardedStep`` does with whole gradients."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_waits import GPU_0, Waits, communicator_on_gpu
from ranks import run_ranks
from torch import nn
from torch.optim import SGD

import unitrain
from unitrain.training.gradients.guard import GuardedStep
from unitrain.training.gradients.sharded_guard import ShardedGuardedStep

WAYS = [None, 1.0, 1e9]


class Net(nn.Module):
    """Weights of which some ranks have no rows, and one that can't be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(3, 5), nn.Linear(3, 1, bias=False)
        self.scalar = nn.Parameter(torch.ones(()))


def gradients(bad: float | None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(p.shape, generator=generator) for name, p in Net().named_parameters()}
    if bad is not None:
        found["wide.weight"][4, 2] = bad  # a row of the last rank
    return found


def step_in_ways(bad: float | None) -> list[tuple[bool, float | None, dict[str, torch.Tensor]]]:
    """Return for each way whether the optimizer stepped, the norm and the weights."""
    results = []
    with unitrain.init(backend="fsdp", device="cpu", timeout_s=30) as strategy:
        for clip_norm in WAYS:
            torch.manual_seed(0)
            model = Net()
            strategy.prepare(model)
            parameters = dict(model.named_parameters())
            for name, whole in gradients(bad).items():
                parameters[name].grad = torch.empty_like(parameters[name])
                local = strategy.communicator.sharding.to_local(parameters[name].grad)  # type: ignore[arg-type]
                shards = strategy.communicator.sharding.shards_of(parameters[name])
                if len(shards) == 1:
                    local.copy_(whole)
                else:
                    local.copy_(torch.split(whole, [len(shard) for shard in shards])[strategy.rank])
            guard = ShardedGuardedStep(strategy.communicator, clip_norm)
            every = list(parameters.values())
            shards_of_all = [strategy.communicator.sharding.to_local(p.grad) for p in every if p.grad is not None]
            strategy._step.checks.direct.allowed = True  # type: ignore[union-attr]
            stepped, norm = guard.step(SGD(every, lr=0.1), every, shards_of_all)
            weights = {name: strategy.full_tensor(p.detach()) for name, p in parameters.items()}
            results.append((stepped, None if norm is None else norm.item(), weights))
    return results


def step_whole(bad: float | None, clip_norm: float | None) -> tuple[bool, Any, nn.Module]:
    torch.manual_seed(0)
    model = Net()
    for name, gradient in gradients(bad).items():
        model.get_parameter(name).grad = gradient
    every = list(model.parameters())
    guard = GuardedStep(torch.device("cpu"), clip_norm)
    stepped, norm = guard.step(SGD(every, lr=0.1), every, [p.grad for p in every if p.grad is not None])
    return stepped, norm, model


@pytest.mark.parametrize(
    "bad", [None, math.nan, *(pytest.param(bad, marks=pytest.mark.all("another")) for bad in (math.inf, 1e30))]
)
def test_shards_are_checked_clipped_and_stepped_as_the_whole(bad: float | None) -> None:
    """1e30 is finite, though the square that a norm in float32 takes is not."""
    for found in run_ranks(step_in_ways, bad, nprocs=3):
        for way, (stepped, norm, weights) in zip(WAYS, found, strict=True):
            expected, expected_norm, model = step_whole(bad, way)
            assert stepped is expected is (bad is None or bad == 1e30)
            assert norm is None if expected_norm is None else norm == pytest.approx(expected_norm.item(), rel=1e-6)
            for name, weight in weights.items():
                torch.testing.assert_close(weight, model.get_parameter(name).detach(), msg=f"{name} {way}")


def test_a_norm_does_not_wait_for_a_gpu() -> None:
    """Neither if every parameter is divided, which leaves no gradients that each rank has."""
    with Waits() as waits:
        guard = ShardedGuardedStep(communicator_on_gpu(), 1.0)
        gradients = [torch.ones(3, device=GPU_0), torch.ones(2, 2, device=GPU_0)]
        wholes: list[list[Any]] = [[SimpleNamespace(grad=torch.ones_like(one)) for one in gradients]]
        wholes += [[wholes[0][0], SimpleNamespace(grad=gradients[1])], []]
        for parameters in wholes:
            norm = guard._norm(parameters, gradients[: len(parameters)])
            assert norm.device == GPU_0
            guard._scale([], gradients, 1.0, norm)
    assert waits.found == []
