"""Looks at how a loss was computed, for what is left over from a script without UniTrain and trains another model.

The graph of a loss shows its last operations, and torch documents that a node has the tensors saved for backward as
attributes with the prefix ``_saved``. Only the losses of the steps 1, 2, 4, 8 ... are looked at, so that it costs
nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from unitrain import call_site

_NODES = 16  # that are looked at, from the loss on
_SMALLEST_LOSS_SCALE = 1024.0  # a power of two, as a GradScaler has them
# What may stand between a loss and the operation that is looked for.
_PASSED = ("AddBackward0", "DivBackward0", "MulBackward0", "ToCopyBackward0", "ViewBackward0", "CloneBackward0")
_MEANS = ("NllLossBackward0", "NllLoss2DBackward0")
_OF_MEAN = 1  # what torch saves for reduction="mean"


class LossCheck:
    """Warns once of a loss that was divided by hand, scaled by a GradScaler, or is a mean over part of its targets.

    Args:
        accumulate: the setting.
        world_size: number of ranks.

    Attributes:
        next_step: the first step whose loss is to be looked at.
    """

    def __init__(self, accumulate: int, world_size: int) -> None:
        self._accumulate = accumulate
        self._world_size = world_size
        self.next_step: int = 0

    def look(self, loss: Tensor, step: int, *, weighted: bool) -> None:
        """Look at one loss.

        Args:
            loss: scalar, before its backward.
            step: number of steps before this one.
            weighted: whether the script gives the loss's weight.
        """
        self.next_step = max(1, 2 * step)
        message = self._leftover(loss) or ("" if weighted else self._mean_over_some(loss))
        if message:
            self.next_step = sys.maxsize
            call_site.warn(message)

    def _leftover(self, loss: Tensor) -> str:
        node = loss.grad_fn
        if node is None or not node.next_functions:
            return ""
        factor = _constant(node)
        inner = node.next_functions[0][0]
        if factor is None or inner is None or inner.name() == "AddBackward0":  # (a + b) / 2 is a mean of two losses
            return ""
        divisor = factor if node.name() == "DivBackward0" else 1 / factor if factor else 0.0
        if self._accumulate > 1 and divisor == self._accumulate:
            return (
                f"the loss is divided by {self._accumulate}, which is also the setting accumulate: UniTrain averages "
                "over the micro-batches of a step itself, so that these gradients are too small. Pass the mean loss of "
                "the batch."
            )
        if node.name() == "DivBackward0" and self._world_size > 1 and divisor == self._world_size:
            return (
                f"the loss is divided by {self._world_size}, the number of processes: UniTrain averages over the "
                "processes itself, so that these gradients are too small. Pass the mean loss of the batch."
            )
        if node.name() == "MulBackward0" and factor >= _SMALLEST_LOSS_SCALE and math.frexp(factor)[0] == 0.5:
            return (
                f"the loss is multiplied by {factor:.0f}, as by a GradScaler: pass the loss as it is. With "
                'precision="fp16", UniTrain scales it itself.'
            )
        return ""

    def _mean_over_some(self, loss: Tensor) -> str:
        """Return a message if the loss's mean leaves targets out or weighs them, where that matters."""
        if self._world_size == 1 and self._accumulate == 1:
            return ""
        for node in _nodes(loss):
            if node.name() not in _MEANS or node._saved_reduction != _OF_MEAN:
                continue
            total, targets = float(node._saved_total_weight), node._saved_target.numel()
            if total != targets:
                why = "some have ignore_index" if node._saved_weight is None else "classes have weights"
                return (
                    f"the loss is a mean over {total:g}, where the batch has {targets} targets ({why}). Other ranks "
                    "and micro-batches have other sums, so that the mean of their losses is not the mean over the "
                    "global batch: pass weight= to step or backward, which is (labels != -100).sum() for ignored "
                    "targets, and class_weights[labels].sum() for class weights."
                )
        return ""


def _constant(node: Any) -> float | None:
    """Return the number that a node multiplies or divides by, or None."""
    if node.name() not in ("DivBackward0", "MulBackward0"):
        return None
    other = node._saved_other
    return float(other) if isinstance(other, Tensor) and not other.dim() and not other.requires_grad else None


def _nodes(loss: Tensor) -> Iterator[Any]:
    """Yield the last nodes of a loss's graph, through sums, scalings and casts."""
    waiting: list[Any] = [loss.grad_fn]
    for _ in range(_NODES):
        if not waiting:
            return
        node = waiting.pop(0)
        if node is None:
            continue
        yield node
        if node.name() in _PASSED:
            waiting += [following for following, _ in node.next_functions]
