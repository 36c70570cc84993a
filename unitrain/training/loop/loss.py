"""Checks of the loss, and the gradient scale of its backward."""

from __future__ import annotations

import torch
from torch import Tensor

from unitrain.errors import UsageError

Weight = float | int | Tensor
_MOST_CACHED = 64


def checked(loss: Tensor) -> Tensor:
    """Return a loss as a tensor without dimensions.

    Raises:
        UsageError: it is not a tensor of one element, or does not require grad.
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


def refuse_a_second_backward(error: RuntimeError) -> None:
    """Raise UsageError if torch's error is about a second backward through the same graph."""
    if "backward through the graph a second time" in str(error):
        raise UsageError(
            "backward was already called on this loss: step() calls it itself, so remove loss.backward(). Add losses "
            "that share a part of the graph, and pass their sum to step()."
        ) from error


def refuse_a_second_derivative_through_freed_weights(error: RuntimeError) -> None:
    """Raise UsageError if torch's error is about a gradient's own graph, whose weights a sharded model has freed."""
    if "storage of size 0" in str(error):
        raise UsageError(
            "the backward needs weights that a sharded model has freed. If the loss has a gradient of the model in it "
            "(torch.autograd.grad with create_graph=True, as gradient penalties do), keep them until the step: set "
            "fsdp.reshard_after_backward to false."
        ) from error


def refuse_reentrant_checkpointing(loss: Tensor) -> None:
    """Raise UsageError if the loss was computed with reentrant activation checkpointing.

    Its backward can't be limited to the parameters of one optimizer: those within would silently get no gradients.
    """
    pending, seen = [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise UsageError(
                "reentrant activation checkpointing does not work with several optimizers: pass use_reentrant=False to "
                "torch.utils.checkpoint.checkpoint."
            )
        pending += [following for following, _ in node.next_functions]


class GradientScales:
    """Gradient scales: backward starts from these, so that the reduced gradient is that of the mean over all samples.

    Args:
        scaler: the GradScaler of fp16, else None.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = scaler
        self._cached: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}

    def of(self, loss: Tensor, share: Weight) -> Tensor:
        """Return the gradient scale for this rank's share of the window, with the dtype and device of the loss."""
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
