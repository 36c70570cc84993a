"""Rescales the gradients of a window whose share of each loss was not known at its backward."""

from __future__ import annotations

import torch
from torch import Tensor

from unitrain.communication.communicator import Communicator
from unitrain.device import by_device
from unitrain.training.loop.loss import Weight
from unitrain.training.loop.window import Window


class WindowWeights:
    """Sums the weights of a window's losses over its micro-batches and the ranks.

    Args:
        communicator: the communicator of this process.
        unit: the factor that the backend's averaging divides by: the world size, or 1.
        accumulate: number of micro-batches in a window.
    """

    def __init__(self, communicator: Communicator, unit: int, accumulate: int) -> None:
        self._communicator = communicator
        self._distributed = communicator.world_size > 1
        self._unit = unit
        self._accumulate = accumulate

    def add(self, window: Window, weight: Weight, *, last: bool) -> None:
        """Add the weight of a loss. That of the last one of a window begins the sum over the ranks."""
        window.weight = self._as_tensor(weight) if window.weight is None else window.weight + self._as_tensor(weight)
        if last:
            self._sum(window)

    def rescale(self, window: Window, gradients: list[Tensor]) -> None:
        """Make the gradients those of the window's mean loss."""
        if window.weight is not None:
            self._sum(window)
            if window.total_wait is not None:
                window.total_wait()
            factor = self._unit / window.weight
            factor = torch.where(torch.isfinite(factor), factor, 0.0)  # all weights are 0: so are the gradients
            for dtype in {gradient.dtype for gradient in gradients}:
                for alike in by_device(g for g in gradients if g.dtype == dtype):
                    torch._foreach_mul_(alike, factor.to(alike[0].device, dtype))
        elif window.micro_batch is None:
            # A window ended early by sync=True: each backward was scaled by 1 / accumulate.
            for alike in by_device(gradients):
                torch._foreach_mul_(alike, self._accumulate / window.micro_batches)

    def _as_tensor(self, weight: Weight) -> Tensor:
        """Return a weight as a new tensor on the device, without synchronising with a GPU if it is a float."""
        device = self._communicator.device
        if isinstance(weight, Tensor):
            return weight.detach().to(device, torch.float64, copy=True)
        return torch.full((), weight, dtype=torch.float64, device=device)

    def _sum(self, window: Window) -> None:
        if self._distributed and window.weight is not None and window.total_wait is None:
            name = f"weight of {window.name}"
            window.total_wait = self._communicator.all_reduce_async(window.weight, "sum", name)
