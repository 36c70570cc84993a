"""One backward: a loss that is not finite shows in the reduced gradients, and one that counts for nothing does not.

The *reduced* gradients then tell all ranks, without a vote.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from unitrain.training.loss import Weight, refuse_a_second_backward
from unitrain.training.window import Window


def run_backward(
    loss: Tensor,
    scale: Tensor | None,
    inputs: Sequence[Parameter] | None,
    windows: Sequence[Window],
    counts: Weight,
    *,
    on_host: bool,
    distributed: bool,
) -> None:
    """Run backward, and take note in ``windows`` of whether the loss is finite.

    On a GPU the host does not know that yet: the device adds NaN to a gradient where it is not.

    Args:
        loss: scalar.
        scale: what backward starts from; None stands for 1.
        inputs: the parameters that get gradients; None stands for all.
        windows: whose gradients these are.
        counts: what the loss counts for; nothing, where it is 0.
        on_host: whether the loss can be read without waiting for a GPU.
        distributed: whether there are other ranks to tell.
    """
    if isinstance(counts, Tensor):
        if counts.is_cuda:
            with _replaced(windows, partial(_zero_where_nothing_counts, weight=counts)):
                _on_device(loss, scale, inputs, windows, distributed)
            return
        counts = counts.item()
    if counts == 0:
        # No product with a loss of NaN may spoil what the other ranks have to say.
        with _replaced(windows, torch.zeros_like):
            _run(loss, scale, inputs)
    elif not on_host:
        _on_device(loss, scale, inputs, windows, distributed)
    elif math.isfinite(loss.item()):
        _run(loss, scale, inputs)
    else:
        # The loss alone may not show in its gradient: where all labels are ignored, it is NaN and its gradient 0.
        for window in windows:
            window.loss_is_finite = False
        with _replaced(windows, partial(torch.full_like, fill_value=math.nan)):
            _run(loss, scale, inputs)


def _run(loss: Tensor, scale: Tensor | None, inputs: Sequence[Parameter] | None) -> None:
    try:
        loss.backward(scale, inputs=inputs)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        refuse_a_second_backward(error)
        raise


def _on_device(
    loss: Tensor,
    scale: Tensor | None,
    inputs: Sequence[Parameter] | None,
    windows: Sequence[Window],
    distributed: bool,
) -> None:
    for window in windows:
        window.losses.append(loss.detach() if scale is None else torch.where(scale == 0, 0.0, loss.detach()))
        if distributed:
            window.local_gradients.add_nan_unless_finite(window.losses[-1])
    _run(loss, scale, inputs)


@contextmanager
def _replaced(windows: Sequence[Window], make: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace every gradient that backward yields in the block, before it is accumulated and reduced."""
    with ExitStack() as stack:
        for window in windows:
            stack.enter_context(window.local_gradients.ignored())
            for p in window.parameters:
                if p.requires_grad:
                    stack.enter_context(p.register_hook(make))  # type: ignore[no-untyped-call]
        yield


def _zero_where_nothing_counts(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return zeros where the weight is 0: a product with it would leave a gradient of NaN as it is."""
    return torch.where(weight.to(gradient.device) == 0, torch.zeros_like(gradient), gradient)
