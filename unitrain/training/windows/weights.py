"""Losses, and how much each weighs in its window, so that the mean over all samples on all ranks is differentiated.

A backward starts from this rank's share of the window, so no gradient is rescaled afterwards. Only if the shares are
unknown beforehand (``weight=``), the weights are summed over the ranks, and the gradients are rescaled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.communication.communicator import Communicator
from unitrain.data.order.sharding import MicroBatch
from unitrain.device import precise
from unitrain.errors import UsageError

_MOST_CACHED = 64
_SAME_LENGTH = 8  # losses, up to which the ranks sum tensors of one length even if they have other numbers of losses
Weight = float | int | Tensor
ScriptLosses = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
"""The losses that a script passes."""
ScriptWeights = Weight | Sequence[Weight] | Mapping[str, Weight] | None
"""Their weights."""


class Losses:
    """The losses of one backward, each a mean over something else. Named ones are sorted, as ranks may differ in that.

    Args:
        loss: a tensor, or a list or dict of tensors, as the script passes it.
        weight: None, or a weight for each loss, in a container of the same kind.
        batch: None, the batch that the losses are of, or one for each, in a container of the same kind.

    Attributes:
        each: the losses.
        weights: one for each loss, or none. After the weights of several losses comes a checksum of their names or
            number, so that their totals show whether all ranks have the same.
        batches: the batch of all losses, or one for each, if the script passes them.

    Raises:
        UsageError: a loss can't be trained on, or weights do not match the losses.
    """

    __slots__ = ("batches", "each", "weights")

    def __init__(self, loss: Any, weight: Any = None, batch: Any = None) -> None:
        self.weights: list[Weight] = []
        self.batches: Sequence[Any] = () if batch is None else _batch_of_each(loss, batch)
        if weight is None and isinstance(loss, Tensor) and loss.requires_grad and not loss.dim():
            self.each: Sequence[Tensor] = (loss,)  # the usual case, without a call
            return
        if weight is None and (isinstance(loss, Tensor) or not isinstance(loss, (Sequence, Mapping))):
            self.each = [checked(loss)]
            return
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
        if not lists or not 0 < len(losses) == len(weights) or any(weight is None for weight in weights):
            raise UsageError(
                f"the loss is {_described(loss)}, but weight= is {_described(weight)}: pass a weight for each loss, "
                "both in lists of the same length, or both in dicts with the same keys. Add losses that are means over "
                "the same number, and pass their sum."
            )
        # Zeros up to one length, and the checksum last: ranks with other losses then still take part in the same sum,
        # and notice the difference in its result.
        rest = [0.0] * (-len(losses) % _SAME_LENGTH) + [1.0 + crc32(repr([names, len(losses)]).encode())]
        self.each = [checked(loss) for loss in losses]
        self.weights = [*weights, *(rest if len(losses) > 1 else ())]


def _batch_of_each(loss: Any, batch: Any) -> Sequence[Any]:
    """Return the batch of each loss, if the script passes as many as losses, or the one batch that all are of."""
    if isinstance(loss, Mapping) and isinstance(batch, Mapping) and loss.keys() == batch.keys():
        return [batch[name] for name in sorted(loss)]
    if isinstance(loss, Sequence) and isinstance(batch, Sequence) and len(loss) == len(batch):
        return batch
    return [batch]


def checked(loss: Tensor) -> Tensor:
    """Return a loss as a tensor without dimensions.

    Raises:
        UsageError: it is no tensor, no scalar or does not require grad.
    """
    if isinstance(loss, Tensor) and loss.requires_grad and not loss.dim():
        return loss
    if not isinstance(loss, Tensor):
        raise UsageError(f"a loss is a tensor, not {type(loss).__name__}: pass the result of the loss function.")
    if loss.numel() != 1:
        raise UsageError(f"a loss must be a scalar, but has shape {tuple(loss.shape)}: pass its mean().")
    if not loss.requires_grad:
        raise UsageError(
            "the loss does not require grad: it was detached, or computed under no_grad() or from frozen parameters."
        )
    return loss.reshape(())


def _described(value: Any) -> str:
    """Return the kind of a loss or weight for a message."""
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(map(repr, value)) or 'nothing'}"
    if isinstance(value, Sequence) or (isinstance(value, Tensor) and value.dim()):
        return f"a list of {len(value)}"
    return "None" if value is None else f"one {type(value).__name__}"


class Weights:
    """Weighs losses, by the numbers of samples that loaders know, or by the script's weights.

    Args:
        communicator: sums weights over the ranks.
        readers: number of ranks that have different samples.
        accumulate: number of micro-batches in a window without a loader.
        unit: the divisor of gradients in the ``Averaging``.

    Attributes:
        communicator: as the argument.
        unit: as the argument.
        of_sample: the share of a loss in the mean of its window, for each sample, times the window's samples.
        uncounted: the share of a loss without a loader.
    """

    def __init__(self, communicator: Communicator, readers: int, accumulate: int, unit: int) -> None:
        self.communicator: Communicator = communicator
        self._device = precise(communicator.device)  # that has float64, in which numbers of tokens add up exactly
        self._accumulate = accumulate
        self.unit: int = unit
        self.of_sample: float = unit * readers / communicator.world_size  # several ranks may have a part of it
        # Without a loader, all batches are taken to have one size, so each has the same weight.
        self.uncounted: float = unit / (communicator.world_size * accumulate)

    def given(self, losses: Losses, micro_batch: MicroBatch | None) -> Weight:
        """Return the weights that the script gives, several as a vector. Without samples, all become 0."""
        if micro_batch is not None and not micro_batch.count:
            count = len(losses.each)
            losses.weights[:count] = [0.0] * count
        weights = losses.weights
        return self.vector(weights) if len(weights) > 1 else weights[0]

    def vector(self, weights: Sequence[Weight]) -> Tensor:
        """Return several weights as a vector."""
        return torch.stack([self.as_tensor(weight) for weight in weights])

    def total(self, name: str) -> Total:
        """Return the sum of the weights of a window, which is empty yet.

        Args:
            name: of the window, the same on all ranks.
        """
        return Total(self, f"weight of {name}")

    def backwards(self, micro_batches: int) -> float:
        """Return the number of backwards in so many micro-batches, on all ranks, divided by ``unit``."""
        return self.communicator.world_size * micro_batches / self.unit

    def as_tensor(self, weight: Weight) -> Tensor:
        """Return a weight as a new tensor on the device, without synchronising with a GPU if it is a float."""
        if isinstance(weight, Tensor):
            # A copy, since the ranks sum it in place.
            return weight.detach().to(self._device, torch.float64, copy=True)
        return torch.full((), weight, dtype=torch.float64, device=self._device)


class Total:
    """The sum of the weights of a window's losses, over its micro-batches and the ranks.

    Attributes:
        weight: of the losses so far; a vector if they have separate weights; None if they have none.
        kept: by the number of a loss, gradients that wait for the total, and are not in ``grad``.
    """

    __slots__ = ("_name", "_wait", "_weights", "kept", "weight")

    def __init__(self, weights: Weights, name: str) -> None:
        self._weights, self._name = weights, name
        self.kept: dict[int, dict[Parameter, Tensor]] = {}  # each loss takes the memory of all gradients
        self.clear()

    def clear(self) -> None:
        """Forget the weights and the gradients that were kept."""
        self.weight: Tensor | None = None
        self._wait: Callable[[], None] | None = None
        self.kept.clear()

    def add(self, weight: Weight, *, last: bool) -> None:
        """Add a weight. The last one of a window begins the sum over the ranks."""
        added = self._weights.as_tensor(weight)
        self.weight = added if self.weight is None else self.weight + added
        if last:
            self._sum()

    def shares(self, weight: Weight) -> Tensor:
        """Return a weight times ``unit``, divided by the total over all ranks, for which it waits. Collective.

        Args:
            weight: a number, or a vector of one for each loss.
        """
        assert self.weight is not None
        self._sum()
        if self._wait is not None:
            self._wait()
            self._wait = lambda: None  # and not None, so that the sum is not started again
        share = weight * self._weights.unit / self.weight
        return torch.where(torch.isfinite(share), share, 0.0)  # all weights are 0: so are the gradients

    def _sum(self) -> None:
        """Start the sum over the ranks, once. It overlaps the backward."""
        if self._weights.communicator.world_size > 1 and self.weight is not None and self._wait is None:
            self._wait = self._weights.communicator.collectives.all_reduce_async(self.weight, "sum", self._name)


class LossScale:
    """The scale of losses under fp16, 1 otherwise.

    Attributes:
        scaler: None without fp16.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.scaler: torch.amp.GradScaler | None = scaler
        self._unscaled = False
        self._starts: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}

    @property
    def handles_overflows(self) -> bool:
        """Whether infinite gradients may only mean that the scale was too large."""
        return self.scaler is not None and self.scaler.get_scale() > 1.0

    def start(self, loss: Tensor, weight: Weight) -> Tensor:
        """Return the gradient that a backward starts from, with the dtype and device of the loss.

        Args:
            loss: a scalar.
            weight: of the loss in the mean of its window. Tensors of the usual weights are cached, since making one
                takes as long as many operations of a small model.
        """
        if isinstance(weight, Tensor):
            start = weight.detach().to(loss.device, loss.dtype).reshape(())
        else:
            key = (weight, loss.dtype, loss.device)
            cached = self._starts.get(key)
            if cached is None:
                if len(self._starts) >= _MOST_CACHED:  # batches of ever other sizes have ever other weights
                    self._starts.clear()
                cached = self._starts[key] = torch.full_like(loss, weight, requires_grad=False)
            start = cached
        return start if self.scaler is None else self.scaler.scale(start)

    def unscale(self, optimizer: Optimizer, gradients: list[Tensor]) -> None:
        """Take the scale out of an optimizer's gradients."""
        if self.scaler is not None and gradients:  # without any, torch's scaler raises an error
            self.scaler.unscale_(optimizer)
            self._unscaled = True

    def update(self) -> None:
        """Choose the next scale. No gradients computed with this one may wait for their update."""
        if self._unscaled and self.scaler is not None:
            self.scaler.update()
            self._unscaled = False
