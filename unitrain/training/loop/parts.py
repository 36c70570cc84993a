"""Several losses with separate weights: each is a mean over something else.

Gradients of several losses can't be told apart once they are added, so the totals of the weights must be known before:
they are summed over the ranks before the last backward of a window, which goes through the weighted mean of all losses.
Before it, within an accumulation window, each loss has a separate backward, and its gradients are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from unitrain.errors import UsageError
from unitrain.training.loop.backward import Weight, checked
from unitrain.training.loop.weights import Weights
from unitrain.training.loop.window import Window

Losses = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
LossWeights = Weight | Sequence[Weight] | Mapping[str, Weight]
_LAST = 8  # operations of a loss, among which a mean divides
_SAME_LENGTH = 8  # losses, up to which the ranks sum tensors of one length even if they have other numbers of losses


def parts_of(loss: Any, weight: Any) -> tuple[list[Tensor], list[Weight]]:
    """Return the losses of a backward, and a weight for each, or none.

    Losses that have names are sorted by them, as ranks may have them in another order. After the weights of several
    losses comes a checksum of their names or number, so that their totals show whether all ranks have the same.
    """
    if weight is None and (isinstance(loss, Tensor) or not isinstance(loss, (Sequence, Mapping))):
        return [checked(loss)], []
    losses, weights, names = loss, weight, []
    if isinstance(weight, Tensor):
        weights = weight.reshape(-1).unbind()
    elif weight is not None and not isinstance(weight, (Sequence, Mapping)):
        weights = [weight]
    if isinstance(loss, Tensor):
        losses = [loss]
    elif isinstance(loss, Mapping) and isinstance(weights, Mapping) and loss.keys() == weights.keys():
        names = sorted(loss)
        losses, weights = [loss[name] for name in names], [weights[name] for name in names]
    lists = isinstance(losses, Sequence) and isinstance(weights, Sequence)
    if not lists or not 0 < len(losses) == len(weights) or any(one is None for one in weights):
        raise UsageError(
            f"the loss is {_described(loss)}, but weight= is {_described(weight)}: pass a weight for each loss, "
            "both in lists of the same length, or both in dicts with the same keys. Add losses that are means over the "
            "same number, and pass their sum."
        )
    rest = [0.0] * (-len(losses) % _SAME_LENGTH) + [1.0 + crc32(repr([names, len(losses)]).encode())]
    return [checked(one) for one in losses], [*weights, *(rest if len(losses) > 1 else ())]


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(map(repr, value)) or 'nothing'}"
    if isinstance(value, Sequence) or (isinstance(value, Tensor) and value.dim()):
        return f"a list of {len(value)}"
    return "None" if value is None else f"one {type(value).__name__}"


def run_parts(
    losses: list[Tensor],
    weights: list[Weight],
    windows: Sequence[Window],
    scales: Weights,
    run: Callable[..., None],
    *,
    last: bool,
) -> None:
    """Run the backward of several losses. ``run`` is ``run_backward`` for these windows; ``last`` ends them."""
    if not last:
        for number, (loss, weight) in enumerate(zip(losses, weights, strict=False), 1):
            run(loss, scales.scale(loss, weight), weight=weight, keep_graph=number < len(losses))
            for window in windows:
                _keep_gradients(window, number)
        return
    if len({window.micro_batches for window in windows}) > 1:
        raise UsageError("several losses for several optimizers need accumulation windows that begin together.")
    for window in windows:
        _put_back(window, scales.shares(window, 1.0))
    shares = scales.shares(windows[0], scales.vector(weights))
    same = (shares[-1] * scales.backwards(windows[0]) - 1).abs() < 1e-12
    if same.is_cpu and not same:
        raise UsageError(
            "the ranks, or the micro-batches of a window, pass different losses (by number or by name): pass all of "
            "them in each step, with weight 0 where there is nothing."
        )
    loss = _weighted_mean(losses, weights, torch.where(same, shares, math.nan))
    run(loss, scales.scale(loss, 1.0), weight=0.0 if all(map(_is_zero, weights[: len(losses)])) else 1.0)


def _weighted_mean(losses: list[Tensor], weights: list[Weight], shares: Tensor) -> Tensor:
    """Return the sum of losses, each times its share. With weight 0, the loss and its gradient may be NaN."""
    total = torch.zeros((), device=losses[0].device)
    for loss, weight, one in zip(losses, weights, shares, strict=False):
        if _is_zero(weight) is not False:
            _let_zero_stay(loss)
        precise = loss.to(losses[0].device, torch.promote_types(loss.dtype, torch.float32))
        share = one.to(precise.device, precise.dtype)
        total = total + torch.where(share == 0, 0.0, precise) * share
    return total


def _is_zero(weight: Weight) -> bool | None:
    """Return whether a weight is 0; None if it is on a GPU, which the host does not wait for."""
    return None if isinstance(weight, Tensor) and not weight.is_cpu else not weight


def _let_zero_stay(loss: Tensor) -> None:
    """Let the last operations of a loss pass a gradient of 0 on as 0: a mean of nothing multiplies it by infinity."""

    def hook(inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None]) -> Any:
        # It is linear in the gradients of the outputs, whichever loss they are of.
        counts = [(gradient != 0).any() for gradient in outputs if gradient is not None]
        some = torch.stack(counts).any() if counts else torch.tensor(True)
        return tuple(None if one is None else torch.where(some.to(one.device), one, 0) for one in inputs)

    nodes: list[Any] = [loss.grad_fn]
    for node in nodes:  # the list grows
        if node is not None and len(nodes) < _LAST:
            nodes += [following for following, _ in node.next_functions]
    for node in filter(None, nodes):
        node.register_hook(hook)


@torch.no_grad()
def _keep_gradients(window: Window, number: int) -> None:
    """Take the gradients of a backward from the parameters, and add them to those of its loss."""
    kept = window.kept.setdefault(number, {})
    for parameter in window.parameters:
        leaf = window.leaf(parameter)
        if leaf.grad is not None:
            kept[parameter] = kept[parameter].add_(leaf.grad) if parameter in kept else leaf.grad
            leaf.grad = None


@torch.no_grad()
def _put_back(window: Window, factors: Tensor) -> None:
    """Give the parameters the sum of the gradients of all losses, each times its factor."""
    for number, kept in window.kept.items():
        for parameter, gradient in kept.items():
            leaf = window.leaf(parameter)
            part = gradient * factors[number - 1].to(gradient.device)
            leaf.grad = part if leaf.grad is None else leaf.grad + part
    window.kept.clear()
