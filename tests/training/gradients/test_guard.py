"""``GuardedStep`` finds every non-finite gradient, reports no finite one, and changes nothing in a skipped step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from needs import GPU
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from unitrain.training.gradients.guard import GuardedStep

CPU = torch.device("cpu")
BAD = [math.nan, math.inf, -math.inf]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
# How the guard finds out: by its own check, or by a norm that is taken anyway.
WAYS: list[dict[str, Any]] = [{}, {"clip_norm": 1.0}, {"clip_norm": 1e9}]


def guard_of(*, clip_norm: float | None = None, flags: bool = False) -> GuardedStep:
    guard = GuardedStep(CPU, clip_norm)
    guard._may_flag = flags  # as on a GPU; fused optimizers heed a flag on a CPU too
    return guard


def parameters_of(*gradients: Tensor) -> list[Parameter]:
    parameters = [Parameter(torch.ones_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters


def guarded(
    guard: GuardedStep, optimizer: Optimizer, parameters: Sequence[Parameter], losses: Sequence[Tensor] = ()
) -> tuple[bool, Tensor | None]:
    gradients = [p.grad for p in parameters if p.grad is not None]
    return guard.step(optimizer, parameters, gradients, losses)


def state_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [dict(its) for its in optimizer.state.values()]


@pytest.mark.parametrize("settings", WAYS)
@pytest.mark.parametrize("bad", BAD)
def test_one_bad_number_anywhere_is_found(bad: float, settings: dict[str, Any]) -> None:
    for where in (0, 17, 99):
        for which in range(3):
            gradients = [torch.ones(3), torch.ones(100), torch.ones(2, 50)]
            gradients[which].view(-1)[where % gradients[which].numel()] = bad
            parameters = parameters_of(*gradients)
            optimizer = SGD(parameters, lr=1, momentum=0.9)
            assert guarded(guard_of(**settings), optimizer, parameters) == (False, None)
            assert all((p == 1).all() for p in parameters)
            assert not state_of(optimizer)


ON_CPU = [("cpu", False, dtype) for dtype in DTYPES]
ON_GPU = [("cuda", fused, dtype) for fused in (False, True) for dtype in DTYPES[:4]]


@pytest.mark.parametrize(
    ("device", "fused", "dtype"), [*ON_CPU, *(pytest.param(*case, marks=[pytest.mark.gpu, GPU]) for case in ON_GPU)]
)
def test_every_type_of_gradient_is_looked_at(device: str, fused: bool, dtype: torch.dtype) -> None:
    guard = GuardedStep(torch.device(device), None)
    for bad in [1.0, *BAD, 1.0]:
        gradients = torch.ones(5, device=device), torch.tensor([1.0, bad], device=device).to(dtype)
        parameters = parameters_of(*gradients)
        stepped, _ = guarded(guard, SGD(parameters, lr=0.5, fused=fused), parameters)
        assert stepped == math.isfinite(bad)
        assert parameters[1].tolist() == [0.5 if stepped else 1.0] * 2


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 1.0}])
@pytest.mark.parametrize("flags", [False, True])
def test_no_finite_gradient_is_accused(settings: dict[str, Any], flags: bool) -> None:
    """Sums and norms of these overflow, though each number is finite."""
    largest = torch.finfo(torch.float32).max
    parameters = parameters_of(torch.full((3,), largest), torch.full((1000,), 1e30))
    optimizer = SGD(parameters, lr=1e-38, momentum=0.9, fused=flags)
    hooked: list[int] = []
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    stepped, norm = guarded(guard_of(flags=flags, **settings), optimizer, parameters)
    assert stepped
    assert norm is None if not settings else norm is not None and math.isinf(norm)
    assert all(p.isfinite().all() for p in parameters)
    assert len(state_of(optimizer)) == 2
    if "clip_norm" not in settings:  # which makes 0 of them
        assert parameters[0].tolist() == pytest.approx([1 - largest * 1e-38] * 3)


def test_the_norm_is_taken_before_clipping() -> None:
    for flags in (False, True):
        for settings in ({"clip_norm": 1e9}, {"clip_norm": 1.0}):
            parameters = parameters_of(torch.tensor([3.0]), torch.tensor([4.0, 0.0]))
            stepped, norm = guarded(guard_of(flags=flags, **settings), SGD(parameters, lr=1.0, fused=flags), parameters)
            assert stepped
            assert norm is not None
            assert norm.item() == 5
            scale = 0.2 if settings["clip_norm"] == 1 else 1
            assert [p.tolist() for p in parameters] == [
                [pytest.approx(1 - 3 * scale)],
                [pytest.approx(1 - 4 * scale), 1],
            ]
    assert guarded(guard_of(), SGD(parameters, lr=1.0), parameters) == (True, None)


@pytest.mark.parametrize("flags", [False, True])
@pytest.mark.parametrize("settings", WAYS)
def test_losses_are_looked_at(settings: dict[str, Any], flags: bool) -> None:
    for bad in [1.0, *BAD]:
        parameters = parameters_of(torch.ones(2))
        optimizer = SGD(parameters, lr=0.5, fused=flags)
        losses = [torch.tensor(1.0), torch.tensor(bad, dtype=torch.float64)]
        stepped, _ = guarded(guard_of(flags=flags, **settings), optimizer, parameters, losses)
        assert stepped == math.isfinite(bad)
        assert (parameters[0] == 1).all() == (not stepped)


class AsOnCuda(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows as few types as torch's check does on a GPU, and notes those that it was asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.asked: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            self.asked += {tensor.dtype for tensor in args[0]}
            if not {tensor.dtype for tensor in args[0]} <= {torch.float32, torch.float64, torch.float16}:
                raise NotImplementedError("not implemented for 'BFloat16'")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("flags", [False, True])
def test_types_that_torchs_check_lacks_are_looked_at_otherwise(flags: bool) -> None:
    guard = guard_of(flags=flags)
    mode = AsOnCuda()
    for step, (bad, other) in enumerate([(1.0, 1.0), *((bad, 1.0) for bad in BAD), (1.0, math.nan), (1.0, 1.0)]):
        gradients = torch.tensor([1.0, bad], dtype=torch.bfloat16), torch.tensor([other]), torch.zeros(0).bfloat16()
        parameters = parameters_of(*gradients)
        with mode:
            stepped, _ = guarded(guard, SGD(parameters, lr=0.5, fused=flags), parameters)
        assert stepped == (math.isfinite(bad) and math.isfinite(other))
        assert parameters[0].tolist() == [0.5 if stepped else 1.0] * 2
        assert mode.asked.count(torch.bfloat16) == 1, f"it was asked again at step {step}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_script_may_set_the_default_dtype(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for gradient, stepped in ((1.0, True), (math.nan, False)):
            parameters = parameters_of(torch.tensor([gradient]))
            assert guarded(guard_of(), SGD(parameters, lr=0.1), parameters)[0] is stepped
    finally:
        torch.set_default_dtype(before)
