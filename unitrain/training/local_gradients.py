"""This rank's own gradients, before they are averaged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from unitrain.training.guard import plain_numbers

_SMALL = 2**16


class LocalGradients:
    """This rank's own gradients of a window, kept until its end, for averaging leaves no trace of whose was bad.

    One tells of nearly all: backward goes through a network from its end, and what is not finite on the way makes
    every gradient after it so. So it is that of the first parameter which is kept, or the first that is small, since
    keeping costs a copy. A gradient that goes bad beside that way (in a hook, or in a layer that nothing to be
    trained stands before) needs ``all_of_them``.

    Args:
        all_of_them: keep every parameter's gradient, at the price of the memory of another set of them.
    """

    def __init__(self, *, all_of_them: bool) -> None:
        self._all_of_them = all_of_them
        self._hooks: list[Any] = []
        self._kept: list[Tensor] = []
        self._keeps = True
        self._nan: Tensor | None = None

    def watch(self, parameters: Sequence[Parameter]) -> None:
        """Keep the gradients of these from now on, and no others'.

        Args:
            parameters: those that are trained, in the order of the optimizer.
        """
        self.close()
        if not self._all_of_them:
            small = (p for p in parameters if p.numel() <= _SMALL)
            first = next(small, min(parameters, key=Parameter.numel, default=None))
            parameters = [] if first is None else [first]
        self._hooks = [p.register_hook(self._keep) for p in parameters]  # type: ignore[no-untyped-call]

    def _keep(self, gradient: Tensor) -> Tensor | None:
        if self._keeps:
            self._kept.append(gradient)
        return None if self._nan is None else gradient + self._nan.to(gradient.dtype)

    def add_nan_unless_finite(self, loss: Tensor) -> None:
        """Let the gradients that are kept become NaN in the coming backward where ``loss`` is not finite.

        The device does so, where the host does not know yet; reduced, they tell all ranks.
        """
        self._nan = torch.where(loss.isfinite(), 0.0, math.nan)

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Keep nothing of a backward that does not count."""
        self._keeps = False
        try:
            yield
        finally:
            self._keeps = True

    def clear(self) -> None:
        """Forget what was kept."""
        self._kept.clear()
        self._nan = None

    def are_finite(self) -> bool:
        """Look at what was kept."""
        return all(map(is_finite, self._kept))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def is_finite(gradient: Tensor) -> bool:
    """Return whether every number in a gradient is finite."""
    return bool(plain_numbers(gradient).isfinite().all())
