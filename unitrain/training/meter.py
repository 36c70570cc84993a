"""Sums and means over all ranks that communicate only when they are read."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from unitrain.communication.communicator import Communicator
from unitrain.data.loop import CurrentBatch
from unitrain.device import precise
from unitrain.errors import UsageError


class Meter:
    """Accumulates a sum and a count on the device. Made by ``strategy.meter()``.

    Adding costs no communication, and no synchronisation with a GPU. Reading (``value``, ``sum``, ``count``) reduces
    both over the ranks in one call, which is collective: call it on every rank, or none. Values that are added for a
    stand-in, the batch of a rank without samples, are ignored. Ranks that share batches (``Strategy.batch_group``) add
    values of the same samples, or means over parts of them: sums and counts are divided by their number.

    Args:
        communicator: sums over the ranks.
        copies: number of ranks that have the same samples.
        current_batch: tells whether the batch that the script works on is a stand-in.
    """

    def __init__(self, communicator: Communicator, copies: int, current_batch: CurrentBatch) -> None:
        self._communicator = communicator
        self._copies = copies
        self._current_batch = current_batch
        # In float64, so that a sum over millions of samples keeps the digits of each. It follows its first value to the
        # device, and starts on the CPU: a meter that is only given floats never touches the GPU.
        self._total = torch.zeros((), dtype=torch.float64)
        self._count = 0

    @overload
    def add(self, *, total: Tensor | float, count: int = 1) -> None: ...

    @overload
    def add(self, *, mean: Tensor | float, count: int) -> None: ...

    def add(
        self,
        *unnamed: object,
        total: Tensor | float | None = None,
        mean: Tensor | float | None = None,
        count: int = 1,
    ) -> None:
        """Add the sum or the mean over ``count`` samples. Nothing is communicated.

        Args:
            *unnamed: not allowed: a positional value could be a sum or a mean.
            total: scalar; the sum over the samples.
            mean: scalar; the mean over the samples, such as the result of a loss function.
            count: number of samples. With 0 nothing is added, whatever the value.

        Raises:
            UsageError: the value was passed by position, or not exactly one of ``total`` and ``mean`` was passed.

        Example:
            >>> losses.add(mean=loss, count=len(labels))
            >>> accuracy.add(total=(logits.argmax(1) == labels).sum(), count=len(labels))
        """
        if unnamed or (total is None) == (mean is None):
            raise UsageError(
                "a meter's add() takes exactly one of total= (a sum over samples) and mean= (a mean over samples), by "
                "keyword, and count= (number of samples): meter.add(mean=loss, count=len(labels))."
            )
        if count == 0 or self._current_batch.is_stand_in:
            return
        value = total if mean is None else mean
        assert value is not None  # checked above
        if isinstance(value, Tensor):
            value = value.detach()
            if self._total.device != value.device:
                value = value.to(precise(value.device))
                self._total = self._total.to(value.device)  # a copy, once: no later add waits for the device
        if mean is not None:
            # In float64: a float32 product with a large count would lose digits that the sum keeps.
            value = value.to(torch.float64) * count if isinstance(value, Tensor) else value * count
        if isinstance(value, Tensor) and value.dim():
            raise UsageError(
                f"a meter adds numbers, not a tensor of shape {tuple(value.shape)}: pass mean=x.mean() or "
                "total=x.sum(), and count= with the number of samples."
            )
        self._total += value
        self._count += count

    def _reduced(self) -> Tensor:
        """Return the sum and the count over all ranks, as a vector of two. Collective."""
        sums = torch.stack([self._total, torch.full_like(self._total, self._count)])
        return self._communicator.all_reduce(sums) / self._copies

    def value(self) -> float:
        """Return the mean over all samples of all ranks, or NaN without samples. Collective."""
        total, count = self._reduced().tolist()
        return float(total / count) if count else float("nan")

    def sum(self) -> float:
        """Return the sum over all ranks. Collective."""
        return float(self._reduced()[0])

    def count(self) -> int:
        """Return the number of samples over all ranks. Collective."""
        return int(self._reduced()[1])

    def reset(self) -> None:
        """Reset sum and count to 0."""
        self._total.zero_()
        self._count = 0
