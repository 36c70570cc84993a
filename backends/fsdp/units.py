"""Which modules FSDP gathers one at a time, and which parameters it can shard, or gather in autocast's dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm

from unitrain.errors import ConfigError, nearest

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_LEAST_SHARE = 1e-3  # smaller modules are gathered with what contains them: each takes another collective

_CONVERTED = frozenset(
    {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d}
)  # not their subclasses, which may use their weights in another way


def units(module: nn.Module, wrap: Sequence[str] | None) -> list[nn.Module]:
    """Return the modules within ``module`` to gather separately, inner ones first.

    A module that shares a parameter with one outside of it is left out, and so is a BatchNorm layer, and a module
    without a forward, as no call would gather its weights.

    Args:
        module: the module to shard.
        wrap: names of classes, or None for the children of lists of modules, except tiny ones.

    Raises:
        ConfigError: ``wrap`` names a class that no module within it has.
    """
    owners = _owners(module)
    least = _LEAST_SHARE * sum(parameter.numel() for parameter in owners) if wrap is None else 1
    separate: list[nn.Module] = []
    taken: set[Parameter] = set()
    # Inner ones first: a module is worth a unit for the parameters that no unit within it has.
    for inner in reversed(_candidates(module, wrap)):
        parameters = set(inner.parameters())
        rest = sum(parameter.numel() for parameter in parameters - taken)
        if rest >= max(1, least) and set[nn.Module]().union(*(owners[p] for p in parameters)) <= set(inner.modules()):
            separate.append(inner)
            taken |= parameters
    return separate


def _candidates(module: nn.Module, wrap: Sequence[str] | None) -> list[nn.Module]:
    """Return modules, each after those that contain it."""
    # An attention layer uses the weights of its layers without calling them.
    uncalled = {
        child for layer in module.modules() if isinstance(layer, nn.MultiheadAttention) for child in layer.children()
    }
    inner = [layer for layer in module.modules() if layer is not module and layer not in uncalled]
    inner = [layer for layer in inner if _has_forward(layer) and not isinstance(layer, (nn.Sequential, _BatchNorm))]
    if wrap is None:
        children = {child for layer in module.modules() if isinstance(layer, _LISTS) for child in layer.children()}
        return [layer for layer in inner if layer in children]
    classes = sorted({type(layer).__name__ for layer in inner})
    # A misspelt name would silently gather the whole model at once.
    for name in wrap:
        if name not in classes:
            raise ConfigError(
                f"fsdp.wrap names {name!r}, but the model has no module of that class with a forward."
                f"{nearest(name, classes)} It has {', '.join(classes)}."
            )
    return [layer for layer in inner if type(layer).__name__ in wrap]


def _has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called, as a list of modules or of parameters can't."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _owners(module: nn.Module) -> dict[Parameter, set[nn.Module]]:
    """Return the layers that have a parameter, for each parameter."""
    owners: dict[Parameter, set[nn.Module]] = {}
    for layer in module.modules():
        for parameter in layer.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(layer)
    return owners


def not_divisible(module: nn.Module) -> set[Parameter]:
    """Return the parameters that FSDP does not support.

    They are scalars and empty ones, complex ones and integers, and trained ones of another dtype than most.
    """
    divisible = {p for p in module.parameters() if p.dim() and p.numel() and p.is_floating_point()}
    dtypes = Counter[torch.dtype]()
    for parameter in (p for p in divisible if p.requires_grad):
        dtypes[parameter.dtype] += parameter.numel()
    # FSDP reduces the gradients of a unit together, and so in one dtype.
    most = dtypes.most_common(1)[0][0] if dtypes else None
    return {p for p in module.parameters() if p not in divisible or (p.requires_grad and p.dtype != most)}


def converted_by_autocast(module: nn.Module) -> set[Parameter]:
    """Return the parameters that autocast converts wherever they are used, in linear layers and convolutions."""
    return {p for p, layers in _owners(module).items() if all(type(layer) in _CONVERTED for layer in layers)}
