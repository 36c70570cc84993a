"""Checks a loss, and runs its backward so that a non-finite loss shows up in the reduced gradients of all ranks.

This needs no other collective. A loss of weight 0 has no effect on the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from unitrain.errors import UsageError
from unitrain.training.loop.window import Window

Weight = float | int | Tensor
# By a part of torch's error.
_CAUSES = {
    "backward through the graph a second time": (
        "backward was already called on this loss: step() calls it itself, so remove loss.backward(). Add losses that "
        "share a part of the graph, and pass their sum to step()."
    ),
    "storage of size 0": (
        "the backward needs weights that a sharded model has freed. If the loss has a gradient of the model in it "
        "(torch.autograd.grad with create_graph=True, as gradient penalties do), keep them until the step: set "
        "fsdp.reshard_after_backward to false."
    ),
    "donated buffers": (
        "several losses with accumulate go backward one after the other, but torch.compile frees what they share: set "
        "torch._functorch.config.donated_buffer = False before the model is compiled."
    ),
}


def checked(loss: Tensor) -> Tensor:
    """Return a loss as a tensor without dimensions. UsageError says why it can't be trained on."""
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


def run_backward(
    loss: Tensor,
    scale: Tensor | None,
    inputs: Sequence[Tensor] | None,
    windows: Sequence[Window],
    weight: Weight,
    on_host: bool,
    distributed: bool,
    keep_graph: bool = False,
) -> None:
    """Run backward, and record in ``windows`` whether the loss is finite.

    On a GPU (not ``on_host``) the host does not know that yet: if the loss is non-finite, the device adds NaN to a
    gradient. ``inputs`` are the leaves of the graph that get gradients; None means all.
    """
    if isinstance(weight, Tensor):
        if not weight.is_cpu:
            with _replaced(windows, partial(_zero_unless_weighted, weight=weight)):
                _on_device(loss, scale, inputs, windows, distributed, keep_graph)
            return
        weight = weight.item()
    if weight and on_host and math.isfinite(loss.item()):  # the usual case
        _run(loss, scale, inputs, keep_graph)
    elif not weight:
        # Zeros instead of a product with 0, which would be NaN for a loss of NaN.
        with _replaced(windows, torch.zeros_like):
            _run(loss, scale, inputs, keep_graph)
    elif not on_host:
        _on_device(loss, scale, inputs, windows, distributed, keep_graph)
    else:
        # The gradient alone may not show it: if all labels are ignored, the loss is NaN and its gradient 0.
        for window in windows:
            window.loss_is_finite = False
        with _replaced(windows, partial(torch.full_like, fill_value=math.nan)):
            _run(loss, scale, inputs, keep_graph)


def _run(loss: Tensor, scale: Tensor | None, inputs: Sequence[Tensor] | None, keep_graph: bool) -> None:
    try:
        loss.backward(scale, keep_graph, inputs=inputs)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        for part, message in _CAUSES.items():
            if part in str(error):
                raise UsageError(message) from error
        raise


def _on_device(
    loss: Tensor,
    scale: Tensor | None,
    inputs: Sequence[Tensor] | None,
    windows: Sequence[Window],
    distributed: bool,
    keep_graph: bool,
) -> None:
    for window in windows:
        window.losses.append(loss.detach() if scale is None else torch.where(scale == 0, 0.0, loss.detach()))
        if distributed:
            window.local_gradients.add_nan_unless_finite(window.losses[-1])
    _run(loss, scale, inputs, keep_graph)


@contextmanager
def _replaced(windows: Sequence[Window], make: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace every gradient of a backward in the block, before it is accumulated and reduced."""
    with ExitStack() as stack:
        for window in windows:
            stack.enter_context(window.local_gradients.ignored())
            for p in window.parameters:
                if p.requires_grad:
                    stack.enter_context(window.leaf(p).register_hook(make))  # type: ignore[no-untyped-call]
        yield


def _zero_unless_weighted(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return zeros if the weight is 0: a product with it would keep NaN."""
    return torch.where(weight.to(gradient.device) == 0, torch.zeros_like(gradient), gradient)
