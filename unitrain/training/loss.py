"""The loss that a step is given: what is wrong with it, and what its backward starts from."""

from __future__ import annotations

import torch
from torch import Tensor

from unitrain.errors import UsageError

Weight = float | int | Tensor
_MOST_CACHED = 64


def checked(loss: Tensor) -> Tensor:
    """Return a loss as a tensor without dimensions.

    Raises:
        UsageError: it is no tensor of one element, or has no gradient.
    """
    if isinstance(loss, Tensor) and loss.requires_grad and not loss.dim():
        return loss
    if not isinstance(loss, Tensor):
        raise UsageError(f"a loss is a tensor, not {type(loss).__name__}: give step() what the criterion returned.")
    if loss.numel() != 1:
        raise UsageError(f"a loss is one number, but this has shape {tuple(loss.shape)}: take its mean().")
    if not loss.requires_grad:
        raise UsageError(
            "the loss has no gradient: it was detached, or computed under no_grad() or from frozen weights."
        )
    return loss.reshape(())


def refuse_a_second_backward(error: RuntimeError) -> None:
    """Raise UsageError where torch's error is that of a loss that went through backward before."""
    if "backward through the graph a second time" in str(error):
        raise UsageError(
            "this loss has been through a backward already, and step() does one itself: leave yours out. Losses that "
            "share a part of the model are added, and given to step() together."
        ) from error


class GradientScales:
    """What backward starts from instead of 1, so that the reduced gradient is that of the mean over all samples.

    Args:
        scaler: fp16's loss scale, else None.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = scaler
        self._cached: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}

    def of(self, loss: Tensor, share: Weight) -> Tensor:
        """Return this rank's share of the window, in the loss's form."""
        if isinstance(share, Tensor):
            scale = share.detach().to(loss.device, loss.dtype).reshape(())
        else:
            key = (share, loss.dtype, loss.device)
            cached = self._cached.get(key)
            if cached is None:
                if len(self._cached) >= _MOST_CACHED:
                    self._cached.clear()
                cached = self._cached[key] = torch.full_like(loss, share, requires_grad=False)
            scale = cached
        return scale if self._scaler is None else self._scaler.scale(scale)
