"""``strategy.step``, ``backward`` and ``update`` on one process: as a plain loop, and errors for misuse."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from needs import GPU
from plain_loop import Ready, assert_equal, data, model_of, plain, ready, sgd, strategy_of, trained, weights
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR

import unitrain
from unitrain import NonFiniteError, Strategy, UsageError
from unitrain.training.hooks import Hooks, StepHook

__all__ = ["ready"]  # the fixture


# ------------------------------------------------------------------------------------------- equal to a plain loop


def test_step_is_the_plain_loop() -> None:
    assert_equal(trained(strategy_of(), 5), plain(5))


def test_clipping_by_norm_is_torch_s_and_returns_the_norm() -> None:
    norms: list[Tensor] = []
    expected = plain(5, before_step=lambda m: norms.append(nn.utils.clip_grad_norm_(m.parameters(), 0.5)))
    strategy = strategy_of(clip_norm=0.5)
    model, optimizer = strategy.prepare(*(lambda m: (m, sgd(m)))(model_of()))
    loader = strategy.dataloader(data(), global_batch_size=5)
    returned = [
        strategy.step(mse_loss(model(inputs), targets), optimizer).grad_norm
        for _ in loader.epochs(2)
        for inputs, targets in loader
    ]
    assert_equal(model, expected)
    assert [float(norm) for norm in returned if norm is not None] == pytest.approx([float(norm) for norm in norms])
    assert max(map(float, norms)) > 0.5  # something was clipped


def test_clipping_by_value_is_torch_s() -> None:
    expected = plain(5, before_step=lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.1))
    assert_equal(trained(strategy_of(clip_value=0.1), 5), expected)


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
    model = model_of()
    model, optimizer = strategy.prepare(model, sgd(model))
    strategy.step(model(torch.ones(1, 4)).sum(), optimizer)
    with pytest.warns(UserWarning, match="no parameter of optimizer 0 has a gradient"):
        strategy.step(copy.deepcopy(model)(torch.ones(1, 4)).sum(), optimizer)


def test_scheduler_moves_only_with_the_optimizer() -> None:
    strategy = strategy_of(accumulate=3, on_nonfinite="skip")
    model = model_of()
    optimizer = sgd(model)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, scheduler = strategy.prepare(model, optimizer, scheduler)
    for factor in [1.0] * 6 + [math.nan] + [1.0] * 2:
        strategy.step(model(torch.ones(1, 4)).sum() * factor, optimizer, scheduler)
    assert scheduler.last_epoch == 2
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 3)


# --------------------------------------------------------------------------------- several losses and optimizers


def test_scheduler_of_several_optimizers_moves_once() -> None:
    strategy = strategy_of()
    one, two = model_of(1), model_of(2)
    optimizers = [sgd(one), sgd(two)]
    scheduler = StepLR(optimizers[0], 1)
    strategy.prepare(one, two, *optimizers, scheduler)
    x = torch.ones(1, 4, dtype=torch.float64)
    strategy.step((one(x) + two(x)).sum(), optimizers, scheduler)
    assert scheduler.last_epoch == 1


def test_unused_parameters_are_left_alone() -> None:
    strategy = strategy_of()
    model = model_of()
    model.unused = nn.Linear(3, 3).double()
    before = model.unused.weight.clone()
    prepared, optimizer = strategy.prepare(model, AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    for _ in range(3):
        strategy.step(prepared[0](torch.ones(2, 4, dtype=torch.float64)).sum(), optimizer)
    assert torch.equal(model.unused.weight, before)
    assert model.unused.weight not in optimizer.state


def test_sparse_gradients() -> None:
    strategy = strategy_of()
    model, expected = (nn.Embedding(10, 3, sparse=True, _weight=torch.ones(10, 3).double()) for _ in range(2))
    model, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.1))
    plain_optimizer = SGD(expected.parameters(), lr=0.1)
    rows = torch.tensor([1, 3, 3])
    strategy.step(model(rows).pow(2).sum(), optimizer)
    expected(rows).pow(2).sum().backward()
    plain_optimizer.step()
    assert_equal(model, expected)


# ------------------------------------------------------------------------------------------------------ not finite


def test_a_norm_that_overflows_is_not_a_gradient_that_does() -> None:
    """The norm speaks for the gradients only where it is finite."""
    strategy = strategy_of(precision="fp32", clip_norm=1.0, on_nonfinite="raise")
    parameter = nn.Parameter(torch.ones(2))
    model = nn.Module()
    model.register_parameter("parameter", parameter)
    model, optimizer = strategy.prepare(model, SGD([parameter], lr=0.1))
    result = strategy.step(parameter.sum() * 1e30, optimizer)
    assert result.stepped
    assert result.grad_norm is not None
    assert math.isinf(result.grad_norm)
    assert parameter.isfinite().all()


# On a GPU the optimizer's own kernels leave the weights alone, before the host knows. Fused ones on a CPU do so too.
ON_DEVICE = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, GPU])]


def on_device(device: str, make: Callable[..., Optimizer], **settings: Any) -> tuple[Strategy, nn.Module, Optimizer]:
    strategy = unitrain.init(backend="single", precision="fp64", device=device, **settings)
    strategy._step._differentiate._on_host = False  # as on a GPU
    strategy._step._guard._may_flag = True
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


# ----------------------------------------------------------------------------------------------------------- misuse


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


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_large_clip_norm_returns_the_norm_and_clips_nothing(accumulate: int) -> None:
    results = {}
    for measured in (False, True):
        with strategy_of(clip_norm=1e9 if measured else None, accumulate=accumulate) as strategy:
            model, optimizer = strategy.prepare(*(lambda m: (m, sgd(m)))(model_of()))
            seen: list[Tensor] = []

            def note(optimizer: Any, *_: Any, seen: list[Tensor] = seen) -> None:
                seen.extend(p.grad.clone() for group in optimizer.param_groups for p in group["params"])

            optimizer.register_step_pre_hook(note)
            x = 100 * torch.ones(2, 4, dtype=torch.float64)
            result = [strategy.step(model(x).sum(), optimizer) for _ in range(accumulate)][-1]
            results[measured] = (result.grad_norm, torch.cat([g.flatten() for g in seen]), weights(model))
    assert results[False][0] is None
    norm = results[True][0]
    assert norm is not None
    assert torch.allclose(norm, results[True][1].norm(), rtol=1e-12)
    assert torch.equal(results[True][2], results[False][2])


class Once(StepHook):
    """Removes itself when it is called."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks, self.calls = hooks, 0

    def at_boundary(self) -> None:
        self.calls += 1
        self.hooks.remove_hook(self)


def test_a_hook_that_removes_itself_keeps_no_other_from_being_called() -> None:
    hooks = Hooks()
    once = [Once(hooks), Once(hooks), Once(hooks)]
    for hook in once:
        hooks.add_hook(hook)
    for _ in range(2):
        for reached in hooks.at_boundary:
            reached()
    assert [hook.calls for hook in once] == [1, 1, 1]
    assert not hooks.at_boundary
