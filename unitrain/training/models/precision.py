"""``Precision``: the dtype that a model computes in, and the loss scale of fp16."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unitrain.communication.communicator import Communicator
from unitrain.communication.structure import rebuilt
from unitrain.config import Precision as PrecisionName
from unitrain.device import HALF_DTYPES, precise
from unitrain.errors import ConfigError
from unitrain.training.gradients.sharded_guard import ShardedScaler
from unitrain.training.models.passes import ModulePass

_HANDLES = "unitrain_hooks"  # an attribute of modules: a deep copy has handles of its own hooks


class _AutocastForward:
    """Two forward hooks that enable autocast while a module's forward runs.

    Autocast's dtype is thread-local, and DataParallel's threads inherit only whether autocast is enabled: it is entered
    inside the forward. These are hooks and not a replaced ``forward``, so that a deep copy calls its own forward.

    ``torch.compile`` can't trace a context that one function enters and another leaves: both functions are excluded
    from tracing, and the code between them is compiled.

    Args:
        device_type: type of the device that the forward runs on.
        dtype: bfloat16 or float16.
    """

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self._arguments = device_type, dtype
        self._local = threading.local()
        # Not as decorators: these would import the compiler with unitrain, which takes a second or more.
        self._enter = torch.compiler.disable(self._enter_untraced)  # type: ignore[no-untyped-call]
        self._leave = torch.compiler.disable(self._leave_untraced)  # type: ignore[no-untyped-call]

    def __reduce__(self) -> tuple[type[_AutocastForward], tuple[str, torch.dtype]]:
        # A copy or pickle of a module copies its hooks, but neither thread-local storage nor disabled functions.
        return _AutocastForward, self._arguments

    def enter(self, module: nn.Module, args: Any) -> None:
        self._enter()

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._leave()

    def _enter_untraced(self) -> None:
        context = torch.autocast(*self._arguments)
        context.__enter__()  # type: ignore[no-untyped-call]
        self._local.__dict__.setdefault("stack", []).append(context)

    def _leave_untraced(self) -> None:
        stack = self._local.__dict__.get("stack")
        if stack:  # empty if another hook raised before autocast was entered
            stack.pop().__exit__(None, None, None)


def _inputs_to_double(module: nn.Module, args: Any, kwargs: Any) -> Any:
    # Each by itself: compilers can't trace a comparison of tuples.
    double = partial(rebuilt, leaf=_double, opened=True)
    return tuple(map(double, args)), {name: double(value) for name, value in kwargs.items()}


def _double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def check_precision(name: PrecisionName, device: torch.device) -> None:
    """Raise ConfigError if the device does not support a precision. Called before the job is joined."""
    if name == "fp64" and precise(device) != device:
        raise ConfigError(f"precision is fp64, which {device.type} lacks: set it to fp32, or device to cpu.")


class Precision(ModulePass):
    """The precision of a run: fp32, fp64, or float32 weights with autocast to bf16 or fp16.

    Args:
        name: the setting.
        device: the device of this rank.
        sharded: the communicator if each rank has a part of every parameter; else None.

    Attributes:
        scaler: the GradScaler of fp16, else None.
    """

    place = 40

    def __init__(self, name: PrecisionName, device: torch.device, sharded: Communicator | None = None) -> None:
        self._device_type = device.type
        self._name = name
        self._dtype = HALF_DTYPES.get(name)
        self.scaler: torch.amp.GradScaler | None = None
        if name == "fp16":
            self.scaler = torch.amp.GradScaler(device.type) if sharded is None else ShardedScaler(sharded)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context manager for computing a loss. It does nothing in fp32 and fp64."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device_type, self._dtype)

    def apply(self, module: nn.Module) -> None:
        """Make the module's forward compute in this precision, in any thread."""
        handles = hook_handles(module)
        if self._dtype is not None:
            # First before the forward, and called even if that raises: no other hook runs outside of autocast.
            autocast = _AutocastForward(self._device_type, self._dtype)
            handles.append(module.register_forward_pre_hook(autocast.enter, prepend=True))
            handles.append(module.register_forward_hook(autocast.leave, always_call=True))
        elif self._name == "fp64":
            module.double()
            handles.append(module.register_forward_pre_hook(_inputs_to_double, prepend=True, with_kwargs=True))


def hook_handles(module: nn.Module) -> list[RemovableHandle]:
    """Return the handles of the hooks that ``prepare`` has registered on a module, as a list to append to."""
    handles: list[RemovableHandle] = vars(module).setdefault(_HANDLES, [])
    return handles


def remove_hooks(module: nn.Module) -> None:
    """Remove the hooks that ``prepare`` registered on a module, or on the module that it is a copy of."""
    for handle in vars(module).pop(_HANDLES, ()):
        handle.remove()
