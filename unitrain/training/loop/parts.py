"""Several losses with separate weights: each is a mean over something else.

Gradients of several losses can't be told apart once they are added, so the totals of the weights must be known before:
they are summed over the ranks before the last backward of a window, which goes through the weighted mean of all losses.
Before it, within an accumulation window, each loss has a separate backward, and its gradients are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unitrain.errors import UsageError
from unitrain.training.windows.weights import Losses, LossScale, Weight, Weights
from unitrain.training.windows.window import Window

_LAST = 8  # operations of a loss, among which a mean divides


def run_parts(
    losses: Losses,
    windows: Sequence[Window],
    weights: Weights,
    scale: LossScale,
    run: Callable[..., None],
    *,
    last: bool,
) -> None:
    """Run the backward of several losses.

    Args:
        losses: with a weight for each.
        windows: of the optimizers whose parameters get gradients.
        weights: turns them into a vector.
        scale: makes the gradient that a backward starts from.
        run: runs one backward, given a loss, this gradient, the loss's weight, and whether to keep the graph.
        last: whether this backward ends the windows.

    Raises:
        UsageError: the ranks, or the micro-batches of a window, have different losses.
    """
    each = losses.each
    if not last:
        for number, (loss, weight) in enumerate(zip(each, losses.weights, strict=False), 1):
            run(loss, scale.start(loss, weight), weight, keep_graph=number < len(each))
            for window in windows:
                window.set_aside(number)
        return
    if len({window.micro_batches for window in windows}) > 1:
        raise UsageError("several losses for several optimizers need accumulation windows that begin together.")
    for window in windows:
        window.put_back()
    shares = windows[0].total.shares(weights.vector(losses.weights))
    # The last share is that of the checksum. Where all backwards passed the same one, it is 1 over their number. On a
    # GPU, which the host does not wait for, NaN makes all gradients non-finite instead of the error.
    agree = (shares[-1] * weights.backwards(windows[0].micro_batches + 1) - 1).abs() < 1e-12
    if agree.is_cpu and not agree:
        raise UsageError(
            "the ranks, or the micro-batches of a window, pass different losses (by number or by name): pass all of "
            "them in each step, with weight 0 where there is nothing."
        )
    loss = _weighted_mean(losses, torch.where(agree, shares, math.nan))
    run(loss, scale.start(loss, 1.0), 0.0 if all(map(_is_zero, losses.weights[: len(each)])) else 1.0)


def _weighted_mean(losses: Losses, shares: Tensor) -> Tensor:
    """Return the sum of losses, each times its share. With weight 0, the loss and its gradient may be NaN."""
    total = torch.zeros((), device=losses.each[0].device)
    for loss, weight, share in zip(losses.each, losses.weights, shares, strict=False):
        if _is_zero(weight) is not False:
            _let_zero_stay(loss)
        precise = loss.to(losses.each[0].device, torch.promote_types(loss.dtype, torch.float32))
        factor = share.to(precise.device, precise.dtype)
        total = total + torch.where(factor == 0, 0.0, precise) * factor
    return total


def _is_zero(weight: Weight) -> bool | None:
    """Return whether a weight is 0; None if it is on a GPU, which the host does not wait for."""
    return None if isinstance(weight, Tensor) and not weight.is_cpu else not weight


def _let_zero_stay(loss: Tensor) -> None:
    """Let the last operations of a loss pass a gradient of 0 on as 0: a mean of nothing multiplies it by infinity."""

    def hook(inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None]) -> Any:
        # It is linear in the gradients of the outputs, whichever loss they are of.
        nonzero = [(gradient != 0).any() for gradient in outputs if gradient is not None]
        counts = torch.stack(nonzero).any() if nonzero else torch.tensor(True)
        return tuple(
            None if gradient is None else torch.where(counts.to(gradient.device), gradient, 0) for gradient in inputs
        )

    nodes: list[Any] = [loss.grad_fn]
    for node in nodes:  # the list grows
        if node is not None and len(nodes) < _LAST:
            nodes += [following for following, _ in node.next_functions]
    for node in filter(None, nodes):
        node.register_hook(hook)
