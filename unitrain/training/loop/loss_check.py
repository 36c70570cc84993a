"""Looks at how a loss was computed, for what is left over from a script without UniTrain and trains another model.

The graph of a loss shows its last operations, and torch documents that a node has the tensors saved for backward as
attributes with the prefix ``_saved``. Only the losses of the steps 1, 2, 4, 8 ... are looked at, so that it costs
nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from unitrain import call_site

_NODES = 16  # that are looked at, from the loss on
_SMALLEST_SCALE = 1024.0  # of a GradScaler, which has it as a float32 tensor
# What may stand between a loss and the operation that is looked for.
_PASSED = ("AddBackward0", "DivBackward0", "MulBackward0", "ToCopyBackward0", "ViewBackward0", "CloneBackward0")
_MEANS = ("NllLossBackward0", "NllLoss2DBackward0")
_OF_MEAN, _OF_SUM = 1, 2  # what torch saves for reduction="mean" and "sum"


class LossCheck:
    """Warns once of a loss that was divided by hand, scaled by a GradScaler, or is a mean over part of its targets.

    Attributes:
        next_step: the first step whose loss is to be looked at.
    """

    def __init__(self, accumulate: int, world_size: int) -> None:
        self._accumulate = accumulate
        self._world_size = world_size
        self.next_step: int = 0

    def look(self, loss: Tensor, step: int, *, weighted: bool) -> None:
        """Look at one loss. ``step`` is the number of steps before it; ``weighted``: the script gives its weight."""
        self.next_step = max(1, 2 * step)
        message = ""
        with suppress(RuntimeError):  # a backward has freed the graph, as this one will say
            message = self._leftover(loss) or ("" if weighted else self._mean_over_some(loss))
        if message:
            self.next_step = sys.maxsize
            call_site.warn(message)

    def _leftover(self, loss: Tensor) -> str:
        """Return a message if the last operation on the loss scales it as scripts without UniTrain do."""
        node: Any = loss.grad_fn
        if node is None or node.name() not in ("DivBackward0", "MulBackward0"):
            return ""
        other, inner = node._saved_other, node.next_functions[0][0]
        if not isinstance(other, Tensor) or other.dim() or other.requires_grad or inner is None or _adds(inner):
            return ""
        factor, divides = float(other), node.name() == "DivBackward0"
        divisor = factor if divides else 1 / factor if factor else 0.0
        if self._accumulate > 1 and divisor == self._accumulate:
            what = f"divided by {self._accumulate}, the setting accumulate: UniTrain averages over micro-batches"
        elif divides and self._world_size > 1 and divisor == self._world_size:
            what = f"divided by {self._world_size}, the number of processes: UniTrain averages over processes"
        elif not divides and other.dtype == torch.float32 and factor >= _SMALLEST_SCALE and factor.is_integer():
            what = f'multiplied by {factor:.0f}, as by a GradScaler: with precision="fp16", UniTrain scales losses'
        else:
            return ""
        return f"the loss is {what} itself. Pass the mean loss of the batch."

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


def _adds(node: Any) -> bool:
    """Return whether a node is a sum: to divide a sum of losses, or over a batch, makes the mean of it."""
    return "Add" in node.name() or "Sum" in node.name() or getattr(node, "_saved_reduction", 0) == _OF_SUM


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
