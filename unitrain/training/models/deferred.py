"""Builds models whose parameters take no memory until ``prepare`` initialises them."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from unitrain import call_site

RESETS = ("reset_parameters", "_reset_parameters")
"""Methods that initialise a module's own parameters; the second one belongs to torch's attention and Transformer."""
_CONSTRUCTION = "unitrain_construction"  # an attribute of parameters


class Construction(TorchFunctionMode):
    """Puts parameters on the meta device as modules register them.

    Buffers stay in memory, since modules compute them only once.

    Attributes:
        changed_at: a line of user code, if any, that changed a parameter other than in a ``reset_parameters``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changed_at: str | None = None
        self._made: dict[int, tuple[weakref.ref[Parameter], Parameter]] = {}  # by the id of the parameter in memory

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note changes in place of tensors on the meta device."""
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        sets = name == "__setitem__" or (name == "__set__" and getattr(function, "__self__", None) is Tensor.data)
        # Functions of torch.nn.init may return early for tensors on the meta device.
        if in_place or sets or _callers()[1].f_globals.get("__name__") == "torch.nn.init":
            changed = kwargs.get("tensor", args[0] if args else None)
            if isinstance(changed, Tensor) and changed.is_meta:
                self._note_change()
        return function(*args, **kwargs)

    def _note_change(self) -> None:
        if self.changed_at is None and not any(frame.f_code.co_name in RESETS for frame in _callers()):
            self.changed_at = call_site.current()

    def without_memory(self, module: nn.Module, name: str, parameter: Parameter | None) -> Parameter | None:
        """Return what a module registers in place of a parameter."""
        if parameter is None or isinstance(parameter, nn.UninitializedParameter):
            return None
        if parameter.is_meta:
            if _CONSTRUCTION not in vars(parameter):  # computed from another parameter
                self._note_change()
            return None
        known, made = self._made.get(id(parameter), (None, None))
        if made is None or known is None or known() is not parameter:
            made = Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            vars(made).update(vars(parameter), **{_CONSTRUCTION: self})
            self._made[id(parameter)] = weakref.ref(parameter), made
        return made


def _callers() -> list[FrameType]:
    """Return the frames of the function that calls this one, and of its callers."""
    found, frame = [], inspect.currentframe()
    while frame is not None and (frame := frame.f_back) is not None:
        found.append(frame)
    return found


@contextmanager
def deferred() -> Iterator[None]:
    """Context manager in which parameters take no memory. See ``Strategy.deferred``."""
    construction = Construction()
    hook = register_module_parameter_registration_hook(construction.without_memory)  # type: ignore[arg-type]
    try:
        with construction:
            yield
    finally:
        hook.remove()


def construction_of(module: nn.Module) -> Construction | None:
    """Return the construction that a model was built in; None if it was built in memory, or on the meta device."""
    found = (vars(parameter).get(_CONSTRUCTION) for parameter in module.parameters())
    return next((one for one in found if isinstance(one, Construction)), None)
