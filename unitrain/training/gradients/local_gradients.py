"""The local gradients of this rank, before they are averaged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from unitrain.training.gradients.guard import plain_numbers

_SMALL = 2**16


class LocalGradients:
    """Keeps local gradients until the end of a window, to find the rank with a non-finite gradient.

    One gradient is usually enough: backward goes through a network from its end, and a non-finite value makes all
    later gradients non-finite. So the gradient of the first parameter is kept, or of the first small one, since
    keeping it costs a copy. A non-finite gradient on another path (through a hook, or in a layer without
    trained layers before it) needs ``all_of_them``.
    """

    def __init__(self, *, all_of_them: bool, leaf: Callable[[Parameter], Tensor] = lambda p: p) -> None:
        self._all_of_them = all_of_them
        self._leaf = leaf
        self._hooks: list[Any] = []
        self._kept: list[Tensor] = []
        self._keeps = True
        self._nan: Tensor | None = None

    def watch(self, parameters: Sequence[Parameter]) -> None:
        """Keep the gradients of these trained parameters from now on, and no others."""
        self.close()
        if not self._all_of_them:
            small = (p for p in parameters if p.numel() <= _SMALL)
            first = next(small, min(parameters, key=Parameter.numel, default=None))
            parameters = [] if first is None else [first]
        self._hooks = [self._leaf(p).register_hook(self._keep) for p in parameters]  # type: ignore[no-untyped-call]

    def _keep(self, gradient: Tensor) -> Tensor | None:
        if self._keeps:
            self._kept.append(gradient)
        return None if self._nan is None else gradient + self._nan.to(gradient.device, gradient.dtype)

    def add_nan_unless_finite(self, loss: Tensor) -> None:
        """Add NaN to the gradients that are kept in the next backward if ``loss`` is non-finite.

        This runs on the device, since the host does not know the loss yet. The reduced gradients show it to all ranks.
        """
        self._nan = torch.where(loss.isfinite(), 0.0, math.nan)

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Keep no gradients in the block."""
        self._keeps = False
        try:
            yield
        finally:
            self._keeps = True

    def clear(self) -> None:
        """Drop the gradients that were kept."""
        self._kept.clear()
        self._nan = None

    def are_finite(self) -> bool:
        """Return whether all gradients that were kept are finite."""
        return all(map(is_finite, self._kept))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def is_finite(gradient: Tensor) -> bool:
    """Return whether all elements of a gradient are finite."""
    return bool(plain_numbers(gradient).isfinite().all())
