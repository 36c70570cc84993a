"""``strategy.step``, ``backward`` and ``update`` on one process: what is told, what a device decides, and misuse."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from needs import GPU
from plain_loop import Ready, model_of, prepare_model, ready, strategy_of, weights
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import unitrain
from unitrain import NonFiniteError, Strategy, UsageError

__all__ = ["ready"]  # the fixture


@pytest.mark.parametrize("bad", [0, 1])
def test_with_several_optimizers_a_scheduler_moves_with_its_own_and_a_skip_of_any_is_told(bad: int) -> None:
    strategy = strategy_of(on_nonfinite="skip")
    models = [nn.Linear(4, 4), nn.Linear(4, 1)]
    optimizers = [SGD(model.parameters(), lr=1.0) for model in models]
    strategy.prepare(*models, *optimizers)
    handle = models[bad].weight.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call]
    schedulers = [StepLR(one, 1, 0.5) for one in optimizers]
    for number, scheduler in enumerate(schedulers):
        result = strategy.step(models[1](models[0](torch.ones(1, 4))).sum(), optimizers, scheduler)
        assert result.skipped
        assert optimizers[number].param_groups[0]["lr"] == (1.0 if number == bad else 0.5)
    handle.remove()
    assert not strategy.step(models[1](models[0](torch.ones(1, 4))).sum(), optimizers).skipped


def test_a_step_without_any_gradient_is_told() -> None:
    strategy = strategy_of()
    model, optimizer = prepare_model(strategy)
    strategy.step(model(torch.ones(1, 4)).sum(), optimizer)
    with pytest.warns(UserWarning, match="no parameter of optimizer 0 has a gradient"):
        strategy.step(copy.deepcopy(model)(torch.ones(1, 4)).sum(), optimizer)


# On a GPU the optimizer's own kernels leave the weights alone, before the host knows. Fused ones on a CPU do so too.
ON_DEVICE = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, GPU])]


def on_device(device: str, make: Callable[..., Optimizer], **settings: Any) -> tuple[Strategy, nn.Module, Optimizer]:
    strategy = unitrain.init(backend="single", precision="fp64", device=device, **settings)
    strategy._step._autograd._on_host = False  # as on a GPU
    strategy._step.guard._may_flag = True
    model = model_of()
    prepared, optimizer = strategy.prepare(model, make(model.parameters(), lr=0.1, weight_decay=0.01, fused=True))
    return strategy, prepared, optimizer


def fused_sgd(parameters: Any, **options: Any) -> SGD:
    return SGD(parameters, momentum=0.9, **options)


@pytest.mark.parametrize("device", ON_DEVICE)
@pytest.mark.parametrize("make", [fused_sgd, SGD, AdamW])
def test_a_step_given_up_on_the_device_leaves_no_trace(device: str, make: Callable[..., Optimizer]) -> None:
    ends = []
    for factors in ([1, math.nan, 2, -math.inf, 1], [1, 2, 1], [math.nan, 1, 2, 1]):
        strategy, model, optimizer = on_device(device, make, on_nonfinite="skip", clip_norm=0.5)
        hook = Mock(return_value=None)
        optimizer.register_step_pre_hook(hook)
        x = torch.ones(2, 4, dtype=torch.float64, device=device)
        results = [strategy.step(model(x).sum() * factor, optimizer) for factor in factors]
        assert hook.call_count == len(factors), "no step waits for the host"
        assert [result.stepped for result in results] == [math.isfinite(factor) for factor in factors]
        assert [result.grad_norm is None for result in results] == [not result.stepped for result in results]
        state = [value for its in optimizer.state.values() for value in its.values()]
        ends.append(torch.cat([weights(model), *(value.reshape(-1).double() for value in state)]))
        strategy.close()
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[2], ends[1])


@pytest.mark.parametrize("device", ON_DEVICE)
@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.1}])
def test_a_gradient_found_on_the_device_is_named(device: str, settings: dict[str, Any]) -> None:
    strategy, model, optimizer = on_device(device, fused_sgd, on_nonfinite="raise", **settings)
    x = torch.ones(2, 4, dtype=torch.float64, device=device)
    strategy.step(model(x).sum(), optimizer)
    before = weights(model)
    model[2].bias.register_hook(lambda g: torch.full_like(g, math.nan))  # type: ignore[index]
    with pytest.raises(
        NonFiniteError, match=r"step 2: a gradient of rank 0 \(the losses of all ranks were finite\); .*parameter: 2.b"
    ):
        strategy.step(model(x).sum(), optimizer)
    assert torch.equal(weights(model), before)


def test_update_needs_a_backward(ready: Ready) -> None:
    strategy, _, optimizer = ready
    with pytest.raises(UsageError, match=r"update\(\) was called without a backward\(\)"):
        strategy.update(optimizer)


def test_step_needs_an_optimizer(ready: Ready) -> None:
    strategy, model, _ = ready
    with pytest.raises(UsageError, match="takes a torch optimizer"):
        strategy.step(model(torch.ones(2, 4)).sum(), [])
    with pytest.raises(UsageError, match=r"takes a torch optimizer, .*, not Sequential"):
        strategy.step(model(torch.ones(2, 4)).sum(), model)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="take torch optimizers, not str"):
        strategy.step(model(torch.ones(2, 4)).sum(), ["SGD"])  # type: ignore[list-item]
