"""Sums and means over all ranks that cost nothing until they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from unitrain.strategy import Strategy


class Meter:
    """A sum and a count, kept on the device; made by ``strategy.meter()``.

    Reading reduces both over the ranks in one call, so that the result is the mean over all samples and never a mean
    of means.
    """

    def __init__(self, strategy: Strategy) -> None:
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
