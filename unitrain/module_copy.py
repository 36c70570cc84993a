"""Copies parameters with their attributes and hooks, and modules that hold tensors with a graph.

``copy.deepcopy`` refuses the latter: ``weight_norm``'s weight, say, or an attention map that a layer has kept.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter


def computed_values(module: nn.Module) -> dict[int, Tensor]:
    """Return the values of attributes that have a graph, which torch can't copy, by the id of the tensor."""
    attributes = (value for layer in module.modules() for value in vars(layer).values())
    return {id(value): value.detach() for value in attributes if isinstance(value, Tensor) and not value.is_leaf}


def copied(module: nn.Module) -> nn.Module:
    """Return a deep copy of a module. Tensors that its layers have computed are copied without their graph."""
    return copy.deepcopy(module, {key: value.clone() for key, value in computed_values(module).items()})


def without_memory(module: nn.Module, tensors: Iterable[Tensor]) -> nn.Module:
    """Return a deep copy of a module in which some parameters and buffers are on the meta device.

    Args:
        module: the module, which is not changed.
        tensors: the parameters and buffers that take no memory in the copy. Tensors with a graph take none either.
    """
    memo: dict[int, Any] = {key: value.to("meta") for key, value in computed_values(module).items()}
    for tensor in tensors:
        empty = tensor.detach().to("meta")
        memo[id(tensor)] = Parameter(empty, tensor.requires_grad) if isinstance(tensor, Parameter) else empty
    return copy.deepcopy(module, memo)


def add_hooks(leaf: Tensor, *, of: Tensor) -> None:
    """Call the hooks of a parameter with the gradient of the leaf that takes its place in graphs.

    Args:
        leaf: gets the hooks.
        of: the parameter that a script has registered them on.
    """
    for hook in (of._backward_hooks or {}).values():
        leaf.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in (of._post_accumulate_grad_hooks or {}).values():
        leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def in_place_of(tensor: Tensor, values: Tensor) -> Tensor:
    """Give values the attributes and hooks of the tensor that they replace; as a parameter, if it is one.

    Args:
        tensor: a parameter or buffer. Scripts may have set attributes, such as a flag for weight decay.
        values: a tensor without a graph.
    """
    if isinstance(tensor, Parameter):
        values = Parameter(values, tensor.requires_grad)
    vars(values).update(vars(tensor))
    add_hooks(values, of=tensor)
    return values


def _is_alike(device: torch.device, other: torch.device) -> bool:
    """Return whether a tensor can stay the same object when it moves, as ``Module.to`` moves parameters."""
    # torch has no public query for this: it refuses to exchange the storage of two types of tensors.
    try:
        torch.empty(0, device=device).data = torch.empty(0, device=other)
    except RuntimeError:
        return False
    return True


def move_foreign(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Move tensors in place to a device for which torch has another type of tensors, as for a plug-in's.

    ``Module.to`` would make new parameters there, which are not the optimizer's. All others are left where they are.
    """
    for tensor in tensors:
        if tensor.is_meta or _is_alike(tensor.device, device):
            continue
        moved = in_place_of(tensor, tensor.detach().to(device))
        # Swapped, so that optimizers keep their object.
        torch.utils.swap_tensors(tensor, moved)  # type: ignore[no-untyped-call]
