"""A rank's own gradients of a window: which are kept, and which non-finite values they show."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import Parameter

from unitrain.training.gradients.evidence import Evidence


def weights(*sizes: int) -> list[Parameter]:
    return [Parameter(torch.ones(size)) for size in sizes]


@pytest.mark.parametrize(
    ("all_of_them", "bad", "told"),
    [(False, 0, False), (False, 1, True), (False, 2, False), (True, 0, True), (True, 1, True), (True, 2, True)],
)
def test_the_first_small_one_tells_of_all_unless_all_are_kept(all_of_them: bool, bad: int, told: bool) -> None:
    parameters = weights(2**16 + 1, 3, 3)
    kept = Evidence(all_gradients=all_of_them)
    kept.watch(parameters)
    factors = [math.inf if i == bad else 1.0 for i in range(3)]
    sum((p * factor).sum() for p, factor in zip(parameters, factors, strict=True)).backward()  # type: ignore[union-attr]
    assert kept.gradients_are_finite() == (not told)
    kept.clear()
    assert kept.gradients_are_finite()


def test_where_all_are_large_the_smallest_tells() -> None:
    parameters = weights(2**16 + 2, 2**16 + 1)
    kept = Evidence(all_gradients=False)
    kept.watch(parameters)
    (parameters[1] * math.nan).sum().backward()  # type: ignore[no-untyped-call]
    assert not kept.gradients_are_finite()


def test_a_backward_that_does_not_count_and_those_after_the_end_tell_nothing() -> None:
    [weight] = weights(3)
    kept = Evidence(all_gradients=True)
    kept.watch([weight])
    with kept.paused():
        (weight * math.nan).sum().backward()  # type: ignore[no-untyped-call]
    assert kept.gradients_are_finite()
    kept.close()
    (weight * math.nan).sum().backward()  # type: ignore[no-untyped-call]
    assert kept.gradients_are_finite()


@pytest.mark.parametrize("loss", [1.0, math.nan, -math.inf])
def test_a_loss_that_is_not_finite_shows_in_the_gradient(loss: float) -> None:
    [weight] = weights(3)
    kept = Evidence(all_gradients=False)
    kept.watch([weight])
    kept.add_loss(torch.tensor(loss))
    (2 * weight).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.tolist() == pytest.approx([2.0 if math.isfinite(loss) else math.nan] * 3, nan_ok=True)
    assert kept.gradients_are_finite(), "what it kept is of before"


def test_gradients_that_no_step_follows_do_not_fill_the_memory() -> None:
    [weight] = weights(3)
    kept = Evidence(all_gradients=False)
    kept.watch([weight])
    for factor in [math.nan, *[1.0] * 256]:
        torch.autograd.grad((weight * factor).sum(), weight)
    assert kept.gradients_are_finite()
