"""Records which losses and gradients of a window are finite, to find the rank and the parameter that are not."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from unitrain.training.gradients.guard import plain_numbers

_SMALL = 2**16
_MOST_KEPT = 256  # gradients of one parameter, of as many micro-batches


class Evidence:
    """Records the losses of a window, and some of this rank's gradients before they are averaged.

    One gradient is usually enough: backward goes through a network from its end, and a non-finite value makes all
    later gradients non-finite. So the gradient of the first parameter is kept, or of the first small one, since
    keeping it costs a copy. A non-finite gradient on another path (through a hook, or in a layer without
    trained layers before it) needs ``all_gradients``.

    Args:
        all_gradients: keep the gradients of all watched parameters.
        leaf: returns the leaf of the graph for a parameter.

    Attributes:
        is_empty: whether nothing was recorded since the window began.
        loss_is_finite: whether all losses are that the host has read.
        losses: the losses on a GPU, where reading them would wait for it.
    """

    def __init__(self, *, all_gradients: bool, leaf: Callable[[Parameter], Tensor] = lambda p: p) -> None:
        self.leaf: Callable[[Parameter], Tensor] = leaf
        self.is_empty: bool = True
        self.loss_is_finite: bool = True
        self.losses: list[Tensor] = []
        self._all_gradients = all_gradients
        self._hooks: list[Any] = []
        # Those of the script's own autograd.grad arrive here, too, and no step may follow that would drop them.
        self._gradients: deque[Tensor] = deque(maxlen=None if all_gradients else _MOST_KEPT)
        self._keeps = True
        self._factor: Tensor | None = None  # 1 or NaN, on the device: the host does not know which

    def watch(self, parameters: Sequence[Parameter]) -> None:
        """Keep the gradients of these trained parameters from now on, and no others.

        Args:
            parameters: in the order of the optimizer, which is usually the order of the forward.
        """
        self.close()
        if not self._all_gradients:
            # The first parameter gets the last gradient of the backward, which every other one has passed through.
            small = (p for p in parameters if p.numel() <= _SMALL)
            first = next(small, min(parameters, key=Parameter.numel, default=None))
            parameters = [] if first is None else [first]
        self._hooks = [self.leaf(p).register_hook(self._keep) for p in parameters]  # type: ignore[no-untyped-call]

    def _keep(self, gradient: Tensor) -> Tensor | None:
        """Keep a gradient, before it is accumulated. Return another one in its place if it is to show the loss."""
        if self._keeps:
            self._gradients.append(gradient)
            self.is_empty = False
        # A product, since nothing dense can be added to a sparse gradient.
        return None if self._factor is None else gradient * self._factor.to(gradient.device, gradient.dtype)

    def refuse_loss(self) -> None:
        """Record a non-finite loss."""
        self.loss_is_finite = self.is_empty = False

    def add_loss(self, loss: Tensor) -> None:
        """Record a loss that the host does not know yet.

        If parameters are watched, the device makes the gradient NaN that is kept in the next backward unless the loss
        is finite, so that the averaged gradients show it to all ranks.

        Args:
            loss: a scalar on the device, detached.
        """
        self.losses.append(loss)
        self.is_empty = False
        if self._hooks:
            self._factor = torch.where(loss.isfinite(), 1.0, math.nan)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep no gradients in the block."""
        self._keeps = False
        try:
            yield
        finally:
            self._keeps = True

    def clear(self) -> None:
        """Drop the records. A new window begins."""
        self._gradients.clear()
        self._factor = None
        self.loss_is_finite = self.is_empty = True
        self.losses = []

    def losses_are_finite(self) -> bool:
        """Return whether all losses are finite. The host waits for the device."""
        return self.loss_is_finite and all(bool(loss.isfinite()) for loss in self.losses)

    def gradients_are_finite(self) -> bool:
        """Return whether all gradients that were kept are finite. The host waits for the device.

        False if no parameter is watched, as where none are averaged: what is not finite is this rank's then.
        """
        return bool(self._hooks) and all(map(is_finite, self._gradients))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def is_finite(gradient: Tensor) -> bool:
    """Return whether all elements of a gradient are finite. The host waits for the device."""
    return bool(plain_numbers(gradient).isfinite().all())
