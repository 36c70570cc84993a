"""Sums and means over all ranks that cost nothing until they are read, and torchmetrics' objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from unitrain.errors import UsageError

if TYPE_CHECKING:
    from unitrain.communicator import Collectives

M = TypeVar("M")


class Meter:
    """A sum and a count, kept on the device; made by ``strategy.meter()``.

    Reading reduces both over the ranks in one call, so that the result is the mean over all samples and never a mean
    of means.
    """

    def __init__(self, strategy: Collectives) -> None:
        self._strategy = strategy
        self._total = torch.zeros((), dtype=torch.float64)
        self._count = 0

    def add(self, total: Tensor | float, count: int = 1) -> None:
        """Add the ``total`` of ``count`` samples, a scalar. Without samples, as in an empty batch, nothing is added."""
        if count == 0:
            return
        if isinstance(total, Tensor):
            total = total.detach()
            if self._total.device != total.device:
                self._total = self._total.to(total.device)
        self._total += total
        self._count += count

    def _reduced(self) -> Tensor:
        device = self._strategy.device
        pair = torch.stack(
            [self._total.to(device), torch.tensor(float(self._count), dtype=torch.float64, device=device)]
        )
        return self._strategy.all_reduce(pair)

    def value(self) -> float:
        """Return the mean over all samples of all ranks, NaN where there were none. Collective."""
        total, count = self._reduced().tolist()
        return float(total / count) if count else float("nan")

    def sum(self) -> float:
        """Return the sum over all ranks. Collective."""
        return float(self._reduced()[0])

    def count(self) -> int:
        """Return the number of samples over all ranks. Collective."""
        return int(self._reduced()[1])

    def reset(self) -> None:
        """Begin anew."""
        self._total.zero_()
        self._count = 0


def synchronise(metric: M, strategy: Collectives) -> M:
    """See ``Strategy.metric``."""
    # torchmetrics is no dependency: its objects are known by the three attributes that they synchronise through.
    if not all(hasattr(metric, name) for name in ("dist_sync_fn", "distributed_available_fn", "_to_sync")):
        raise UsageError(f"metric() takes a torchmetrics Metric, not {type(metric).__name__}; for a mean, see meter().")
    made: Any = metric

    def gather(state: Tensor, group: object = None) -> list[Tensor]:
        return gather_rows(state, strategy)

    made.dist_sync_fn = gather
    made.distributed_available_fn = lambda: strategy.world_size > 1
    made.to(strategy.device)
    return metric


def gather_rows(tensor: Tensor, strategy: Collectives) -> list[Tensor]:
    """Return every rank's tensor, in rank order; they may differ in the length of their first dimension. Collective."""
    if tensor.dim() == 0:
        return list(strategy.all_gather(tensor))
    lengths = strategy.all_gather(torch.tensor(len(tensor))).tolist()
    padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    return [rows[:length] for rows, length in zip(strategy.all_gather(padded), lengths, strict=True)]
