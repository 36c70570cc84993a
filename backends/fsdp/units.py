"""Which modules FSDP gathers one at a time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm

from unitrain.errors import ConfigError, nearest

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_LEAST_SHARE = 1e-3  # smaller modules are gathered with what contains them: each takes another collective


def units(module: nn.Module, wrap: Sequence[str] | int | None) -> list[nn.Module]:
    """Return the modules within ``module`` to gather separately, inner ones first.

    A module that shares a parameter with one outside of it is left out, and so is a BatchNorm layer.

    Args:
        module: the model.
        wrap: names of classes; or the least number of parameters of a module that is not within another; or None for
            the children of lists of modules, except tiny ones.

    Raises:
        ConfigError: there is no module of a class.
    """
    owners = _owners(module)
    total = sum(parameter.numel() for parameter in owners)
    found: list[nn.Module] = []
    taken: set[Parameter] = set()
    for inner in reversed(_candidates(module, wrap)):
        own = set(inner.parameters())
        rest = sum(parameter.numel() for parameter in own - taken)
        least = wrap if isinstance(wrap, int) else 1 if wrap is not None else max(1, _LEAST_SHARE * total)
        if rest >= least and _owns_all(inner, own, owners):
            found.append(inner)
            taken |= own
    return found


def _candidates(module: nn.Module, wrap: Sequence[str] | int | None) -> list[nn.Module]:
    """Return modules, each after those that contain it."""
    # An attention layer uses the weights of its layers without calling them.
    uncalled = {
        child for layer in module.modules() if isinstance(layer, nn.MultiheadAttention) for child in layer.children()
    }
    inner = [layer for layer in module.modules() if layer is not module and layer not in uncalled]
    inner = [layer for layer in inner if not isinstance(layer, (*_LISTS, _BatchNorm))]
    if isinstance(wrap, int):
        return inner
    if wrap is None:
        children = {child for layer in module.modules() if isinstance(layer, _LISTS) for child in layer.children()}
        return [layer for layer in inner if layer in children]
    classes = {type(layer).__name__ for layer in inner}
    for name in wrap:
        if name not in classes:
            raise ConfigError(
                f"fsdp.wrap has {name!r}, but the model has no module of that class.{nearest(name, sorted(classes))} "
                f"It has {', '.join(sorted(classes))}."
            )
    return [layer for layer in inner if type(layer).__name__ in wrap]


def _owners(module: nn.Module) -> dict[Parameter, set[nn.Module]]:
    """Return the layers that have each parameter."""
    owners: dict[Parameter, set[nn.Module]] = {}
    for layer in module.modules():
        for parameter in layer.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(layer)
    return owners


def _owns_all(inner: nn.Module, own: set[Parameter], owners: dict[Parameter, set[nn.Module]]) -> bool:
    layers = set(inner.modules())
    return all(owners[parameter] <= layers for parameter in own)
