"""``Wrapper``: raises a clear error where a script uses a wrapper, such as torch's DDP, as the module itself."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from .errors import UsageError


class Wrapper(nn.Module):
    """Base class of a wrapper that has the module as ``module``: names the module where an attribute is the module's.

    On backends without a wrapper, ``model.decode(x)`` and ``model.temperature = 0.5`` reach the script's own module.
    torch's wrappers don't know the one, and keep the other to themselves, where no forward reads it.

    Raises:
        AttributeError: the script reads an attribute that only the module has; the message names ``strategy.unwrap``.
        UsageError: it sets one.
    """

    _complete: bool = False  # constructors of torch's wrappers set attributes of their own, such as device

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._complete = True

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Not self.module, which would end here again while the constructor has not set it yet.
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise
        raise AttributeError(
            f"{name!r} is an attribute of the {type(module).__name__}, which prepare() has wrapped for this backend: "
            f"use strategy.unwrap(model).{name}, which works on every backend, but train through model(...)."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        # In the wrapper, once set, an attribute is the wrapper's. This look is cheap, unlike the one at the module.
        if name not in self.__dict__ and self._hides(name):
            raise UsageError(
                f"{name!r} is an attribute of the {type(self.module).__name__}, which prepare() has wrapped, and its "
                f"forward would not see the new value: set strategy.unwrap(model).{name}, as works on every backend."
            )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the original module, without the wrapper: for an average of the weights, say."""
        # A second wrapper would have hooks for gradients that nobody reduces, or replicas that nobody uses.
        copied: nn.Module = copy.deepcopy(self.module, memo)
        return copied

    def _hides(self, name: str) -> bool:
        """Return whether an attribute of this name would hide the module's. Private ones are torch's own."""
        return (
            self._complete and not name.startswith("_") and not hasattr(type(self), name) and hasattr(self.module, name)
        )
