"""Looks at how a loss was computed, to find leftovers of a script without UniTrain that would train another model.

The graph of a loss shows its last operations, and torch documents that a node has the tensors saved for backward as
attributes with the prefix ``_saved``. Only the losses of the steps 1, 2, 4, 8 ... are looked at, so that it costs
nothing. At the end of an epoch, the ranks compare what they saw last.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from unitrain import call_site
from unitrain.communication.communicator import Communicator
from unitrain.data.order.sharding import MicroBatch

_NODES = 16  # that are looked at, from the loss on
_COMPARED = 3  # of the means in a loss
_SMALLEST_SCALE = 1024.0  # of a GradScaler, which has it as a float32 tensor
# What may stand between a loss and the operation that is looked for; scalings may turn a sum into a mean.
_UNSCALED = ("AddBackward0", "ToCopyBackward0", "ViewBackward0", "CloneBackward0")
_PASSED = (*_UNSCALED, "DivBackward0", "MulBackward0", "NegBackward0", "SubBackward0")
_MEANS = ("NllLossBackward0", "NllLoss2DBackward0")
_OF_MEAN, _OF_SUM = 1, 2  # what torch saves for reduction="mean" and "sum"


class LossCheck:
    """Warns once of a loss that was scaled by hand or a GradScaler, is a sum, or is a mean over something but samples.

    Attributes:
        next_step: the first step with a loss that is to be looked at.
    """

    def __init__(self, accumulate: int, world_size: int, *, warns: bool = True) -> None:
        self._accumulate = accumulate
        self._world_size = world_size
        self._warns = warns  # others look for a comparison only
        self.next_step: int = 0
        # In the last loss: what a mean divides by, and the number of samples on this rank, and on all.
        self._means: list[tuple[float, int, int]] = []

    def look(self, loss: Tensor, step: int, *, weighted: bool, micro_batch: MicroBatch | None = None) -> None:
        """Look at one loss.

        Args:
            loss: with its graph.
            step: number of steps before it.
            weighted: whether the script gives its weight, which makes up for other sums.
            micro_batch: the micro-batch that the loss is of, if that is known.
        """
        # Ever more rarely, since a mistake of this kind is there from the first steps on.
        self.next_step = max(self.next_step, 1, 2 * step)
        message, earlier, self._means = "", self._means, []
        with suppress(RuntimeError):  # a backward has freed the graph, as this one will say
            message = self._leftover(loss)
            if not weighted and (self._world_size > 1 or self._accumulate > 1):
                if micro_batch is not None and micro_batch.count:
                    counts = micro_batch.count, micro_batch.stop - micro_batch.start
                    self._means = [(mean, *counts) for mean in _divisors(loss)]
                message = message or _wrong_reduction(loss) or self._mean_over_others(earlier)
        self._warn(message)

    def compare(self, communicator: Communicator) -> None:
        """Warn of means over more for each sample on one rank than on another, in the last loss. Collective."""
        mine = torch.tensor([*self._means, *[(0.0, 0, 0)] * _COMPARED][:_COMPARED], dtype=torch.float64)
        for of_ranks in communicator.all_gather(mine).transpose(0, 1).tolist():
            (first, mean), *others = [(r, mean) for r, mean in enumerate(of_ranks) if mean[1]] or [(0, of_ranks[0])]
            for rank, other in others:
                self._warn(_unequal(other, mean, f"rank {rank}'s", f"on rank {first}"))

    def _warn(self, message: str) -> None:
        """Warn of the first mistake."""
        if message and self._warns:
            self._warns, self.next_step = False, sys.maxsize
            call_site.warn(message)

    def _leftover(self, loss: Tensor) -> str:
        """Return a message if the last operation on the loss scales it as scripts without UniTrain do."""
        node: Any = loss.grad_fn
        if node is None or node.name() not in ("DivBackward0", "MulBackward0"):
            return ""
        operand, inner = node._saved_other, node.next_functions[0][0]
        # A factor with a gradient is learned, and no leftover; a sum of losses is divided to make their mean.
        if not isinstance(operand, Tensor) or operand.dim() or operand.requires_grad or inner is None or _adds(inner):
            return ""
        factor, divides = float(operand), node.name() == "DivBackward0"
        divisor = factor if divides else 1 / factor if factor else 0.0
        if self._accumulate > 1 and divisor == self._accumulate:
            scaling = f"divided by {self._accumulate}, the setting accumulate: UniTrain averages over micro-batches"
        elif divides and self._world_size > 1 and divisor == self._world_size:
            scaling = f"divided by {self._world_size}, the number of processes: UniTrain averages over processes"
        elif not divides and operand.dtype == torch.float32 and factor >= _SMALLEST_SCALE and factor.is_integer():
            scaling = f'multiplied by {factor:.0f}, as by a GradScaler: with precision="fp16", UniTrain scales losses'
        else:
            return ""
        return f"the loss is {scaling} itself. Pass the mean loss of the batch."

    def _mean_over_others(self, earlier: Sequence[tuple[float, int, int]]) -> str:
        """Return a message if a mean in the loss divides by a number that does not follow that of the samples.

        In proportion to the samples, of this rank or of all, it is exact. A mean over parameters divides by a constant.
        """
        for past, mean in zip(earlier, self._means, strict=False):
            # All ranks may have the same number of pixels or tokens for each sample in a step.
            whole = self._accumulate == 1 and not past[0] % past[1] and not mean[0] % mean[1]
            if not whole and (message := _unequal(mean, past, "this rank's", "earlier")):
                return message
        return ""


def _unequal(mean: Sequence[float], other: Sequence[float], here: str, there: str) -> str:
    """Return a message unless two means divide by as much, or by as much for each sample, of their rank or of all."""
    if mean[0] == other[0] or any(math.isclose(mean[0] / mean[i], other[0] / other[i]) for i in (1, 2)):
        return ""
    return (
        f"the loss is a mean over {mean[0]:g} where {here} batch has {mean[1]:g} samples, and over {other[0]:g} for "
        f"{other[1]:g} {there}: something was left out, masked, or is of unequal size. The mean of these is not the "
        "mean over the global batch: pass weight= to step or backward, the number that the loss is divided by, such as "
        "len(targets), mask.sum() or the number of nodes."
    )


def _divisors(loss: Tensor) -> list[float]:
    """Return the numbers of elements, or the sums, that the last means in a loss's graph divide by."""
    return [divisor for node, _ in _nodes(loss) if (divisor := _divisor(node))]


def _divisor(node: Any) -> float:
    """Return the number that a mean divides by; 0 for other operations."""
    name = node.name()
    if name == "MeanBackward0" or (name == "MeanBackward1" and len(node._saved_dim) == len(node._saved_self_sym_sizes)):
        return float(node._saved_self_sym_numel)
    if getattr(node, "_saved_reduction", 0) == _OF_MEAN:
        return float(node._saved_total_weight if name in _MEANS else node._saved_target.numel())
    if name not in ("DivBackward0", "DivBackward1"):
        return 0.0
    divided, divisor = node.next_functions[0][0], node._saved_other
    while divided is not None and divided.name() in ("MulBackward0", "NegBackward0"):
        divided = next((inner for inner, _ in divided.next_functions if inner is not None), None)
    is_mean = divided is not None and divided.name() in ("SumBackward0", "NansumBackward0")
    return float(divisor) if is_mean and not (isinstance(divisor, Tensor) and divisor.dim()) else 0.0


def _wrong_reduction(loss: Tensor) -> str:
    """Return a message if a function of torch sums over samples and nothing divides, or its mean leaves targets out."""
    for node, scaled in _nodes(loss):
        reduction = getattr(node, "_saved_reduction", 0)
        if reduction == _OF_SUM and not scaled and node._saved_target.shape[:1].numel() > 1:
            return (
                "the loss is a sum over samples (reduction='sum'), and UniTrain averages over ranks and micro-batches: "
                "gradients shrink as these are added. Divide the loss by the number of samples."
            )
        if reduction != _OF_MEAN or node.name() not in _MEANS:
            continue
        total, targets = float(node._saved_total_weight), node._saved_target.numel()
        if total != targets:
            reason = "some have ignore_index" if node._saved_weight is None else "classes have weights"
            return (
                f"the loss is a mean over {total:g}, where the batch has {targets} targets ({reason}). Other ranks and "
                "micro-batches have other sums, so that the mean of their losses is not the mean over the global "
                "batch: pass weight= to step or backward, which is (labels != -100).sum() for ignored targets, and "
                "class_weights[labels].sum() for class weights."
            )
    return ""


def _adds(node: Any) -> bool:
    """Return whether a node is a sum: to divide a sum of losses, or over a batch, makes the mean of it."""
    return "Add" in node.name() or "Sum" in node.name() or getattr(node, "_saved_reduction", 0) == _OF_SUM


def _nodes(loss: Tensor) -> Iterator[tuple[Any, bool]]:
    """Yield the last nodes of a loss's graph, and whether they are scaled after it."""
    waiting: list[tuple[Any, bool]] = [(loss.grad_fn, False)]
    for node, scaled in islice(waiting, _NODES):  # which grows
        if node is not None:
            yield node, scaled
            if node.name() in _PASSED:
                scales = scaled or node.name() not in _UNSCALED
                waiting += [(following, scales) for following, _ in node.next_functions]
