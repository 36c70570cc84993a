"""Runs a backward such that a loss that is not finite makes the reduced gradients not finite.

All ranks then see it in the *reduced* gradients, without another collective. A loss of weight 0 has no effect on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from unitrain.training.loop.loss import (
    Weight,
    refuse_a_second_backward,
    refuse_a_second_derivative_through_freed_weights,
)
from unitrain.training.loop.window import Window


def run_backward(
    loss: Tensor,
    scale: Tensor | None,
    inputs: Sequence[Tensor] | None,
    windows: Sequence[Window],
    weight: Weight,
    on_host: bool,
    distributed: bool,
) -> None:
    """Run backward, and record in ``windows`` whether the loss is finite.

    On a GPU the host does not know that yet: if the loss is not finite, the device adds NaN to a gradient.

    Args:
        loss: scalar.
        scale: gradient scale; None means 1.
        inputs: the leaves of the graph that get gradients; None means all.
        windows: the accumulation windows that the gradients belong to.
        weight: weight of the loss; with 0 it has no effect on the gradients.
        on_host: whether the loss can be read without waiting for a GPU.
        distributed: whether there are other ranks.
    """
    if isinstance(weight, Tensor):
        if weight.is_cuda:
            with _replaced(windows, partial(_zero_unless_weighted, weight=weight)):
                _on_device(loss, scale, inputs, windows, distributed)
            return
        weight = weight.item()
    if weight and on_host and math.isfinite(loss.item()):  # the usual case
        _run(loss, scale, inputs)
    elif not weight:
        # Zeros instead of a product with 0, which would be NaN for a loss of NaN.
        with _replaced(windows, torch.zeros_like):
            _run(loss, scale, inputs)
    elif not on_host:
        _on_device(loss, scale, inputs, windows, distributed)
    else:
        # The gradient alone may not show it: if all labels are ignored, the loss is NaN and its gradient 0.
        for window in windows:
            window.loss_is_finite = False
        with _replaced(windows, partial(torch.full_like, fill_value=math.nan)):
            _run(loss, scale, inputs)


def _run(loss: Tensor, scale: Tensor | None, inputs: Sequence[Tensor] | None) -> None:
    try:
        loss.backward(scale, inputs=inputs)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        refuse_a_second_backward(error)
        refuse_a_second_derivative_through_freed_weights(error)
        raise


def _on_device(
    loss: Tensor,
    scale: Tensor | None,
    inputs: Sequence[Tensor] | None,
    windows: Sequence[Window],
    distributed: bool,
) -> None:
    for window in windows:
        window.losses.append(loss.detach() if scale is None else torch.where(scale == 0, 0.0, loss.detach()))
        if distributed:
            window.local_gradients.add_nan_unless_finite(window.losses[-1])
    _run(loss, scale, inputs)


@contextmanager
def _replaced(windows: Sequence[Window], make: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace every gradient of a backward in the block, before it is accumulated and reduced."""
    with ExitStack() as stack:
        for window in windows:
            stack.enter_context(window.local_gradients.ignored())
            for p in window.parameters:
                if p.requires_grad:
                    stack.enter_context(window.leaf(p).register_hook(make))  # type: ignore[no-untyped-call]
        yield


def _zero_unless_weighted(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return zeros if the weight is 0: a product with it would keep NaN."""
    return torch.where(weight.to(gradient.device) == 0, torch.zeros_like(gradient), gradient)
