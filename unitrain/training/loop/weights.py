"""How much each loss weighs in its window, so that the mean over all samples on all ranks is differentiated.

A backward starts from this rank's share of the window, so no gradient is rescaled afterwards. Only if the shares are
unknown beforehand (``weight=``), the weights are summed over the ranks, and the gradients are rescaled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unitrain.communication.communicator import Communicator
from unitrain.device import by_device, precise
from unitrain.training.loop.backward import Weight
from unitrain.training.loop.window import Window

_MOST_CACHED = 64


class Weights:
    """The weights of losses.

    Attributes:
        unit: makes up for a backend that divides the sum of the gradients by the world size: that, or 1.
        uncounted: the share of this rank's loss in a window without a loader.
    """

    def __init__(
        self,
        communicator: Communicator,
        accumulate: int,
        scaler: torch.amp.GradScaler | None,
        *,
        averages: bool,
    ) -> None:
        self._communicator = communicator
        self._device = precise(communicator.device)
        self._accumulate = accumulate
        self._scaler = scaler
        self.unit: int = communicator.world_size if averages else 1
        self.uncounted: float = self.unit / (communicator.world_size * accumulate)
        self._scales: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}

    def scale(self, loss: Tensor, weight: Weight) -> Tensor:
        """Return the gradient that a backward starts from, with the dtype and device of the loss."""
        if isinstance(weight, Tensor):
            scale = weight.detach().to(loss.device, loss.dtype).reshape(())
        else:
            key = (weight, loss.dtype, loss.device)
            cached = self._scales.get(key)
            if cached is None:
                if len(self._scales) >= _MOST_CACHED:
                    self._scales.clear()
                cached = self._scales[key] = torch.full_like(loss, weight, requires_grad=False)
            scale = cached
        return scale if self._scaler is None else self._scaler.scale(scale)

    def add(self, window: Window, weight: Weight, *, last: bool) -> None:
        """Add the weight of a loss to its window. The last one of a window begins the sum over the ranks."""
        window.weight = self._as_tensor(weight) if window.weight is None else window.weight + self._as_tensor(weight)
        if last:
            self._sum(window)

    def rescale(self, window: Window, gradients: list[Tensor]) -> None:
        """Turn gradients of weighted losses into gradients of the window's mean loss."""
        if window.weight is not None:
            factor = self.shares(window, 1.0)
            if factor.dim():
                return  # the backward knew the total
            for dtype in {gradient.dtype for gradient in gradients}:
                for same in by_device(g for g in gradients if g.dtype == dtype):
                    torch._foreach_mul_(same, factor.to(same[0].device, dtype))
        elif window.micro_batch is None:
            # A window ended early by sync=True: each backward was scaled by 1 / accumulate.
            for same in by_device(gradients):
                torch._foreach_mul_(same, self._accumulate / window.micro_batches)

    def shares(self, window: Window, weight: Weight) -> Tensor:
        """Return a weight divided by the total of the window, on all ranks, which this waits for."""
        assert window.weight is not None
        self._sum(window)
        if window.total_wait is not None:
            window.total_wait()
            window.total_wait = lambda: None
        share = weight * self.unit / window.weight
        return torch.where(torch.isfinite(share), share, 0.0)  # all weights are 0: so are the gradients

    def backwards(self, window: Window) -> float:
        """Return the number of backwards in the window, on all ranks, divided by ``unit``."""
        return self._communicator.world_size * (window.micro_batches + 1) / self.unit

    def vector(self, weights: Sequence[Weight]) -> Tensor:
        """Return the weights of several losses as a vector."""
        return torch.stack([self._as_tensor(weight) for weight in weights])

    def _as_tensor(self, weight: Weight) -> Tensor:
        """Return a weight as a new tensor on the device, without synchronising with a GPU if it is a float."""
        device = self._device
        if isinstance(weight, Tensor):
            return weight.detach().to(device, torch.float64, copy=True)
        return torch.full((), weight, dtype=torch.float64, device=device)

    def _sum(self, window: Window) -> None:
        if self._communicator.world_size > 1 and window.weight is not None and window.total_wait is None:
            name = f"weight of {window.name}"
            window.total_wait = self._communicator.all_reduce_async(window.weight, "sum", name)
