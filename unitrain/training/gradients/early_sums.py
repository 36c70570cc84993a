"""``EarlySums``: sums of large gradients, taken in the backward, which tell the check that a gradient is finite."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

_LARGE = 2**18  # elements; of a smaller gradient, the call costs more than it saves


class EarlySums:
    """The sums of large gradients in host memory.

    They are taken as soon as a gradient is complete, while it is in the processor's cache. After the backward, each
    would have to be read from memory again. A sum is finite only if all elements are; if it is not, it may have
    overflowed.
    """

    def __init__(self) -> None:
        self._hooks: dict[Parameter, RemovableHandle] = {}
        self._sums: dict[Parameter, tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def watch(self, parameters: Iterable[Parameter]) -> None:
        """Sum the gradients of the large ones of these parameters from now on."""
        for p in parameters:
            if p.numel() >= _LARGE and p.device.type == "cpu" and p.is_floating_point() and p not in self._hooks:
                self._hooks[p] = p.register_post_accumulate_grad_hook(self._add)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Remove the hooks of the parameters."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._sums.clear()

    def _add(self, parameter: Parameter) -> None:
        gradient = parameter.grad
        if gradient is not None:
            self._sums[parameter] = weakref.ref(gradient), gradient._version, gradient.detach().sum()

    def without_finite(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return the gradients that are not known to be finite."""
        finite = set()
        for parameter, (gradient, version, total) in self._sums.items():
            now = parameter.grad
            if now is not None and now is gradient() and now._version == version and math.isfinite(total.item()):
                finite.add(id(now))
        self._sums.clear()
        return [gradient for gradient in gradients if id(gradient) not in finite] if finite else gradients
