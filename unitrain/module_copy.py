"""Deep copies of modules whose layers keep what they have computed: ``weight_norm``'s weight, an attention map."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter


def computed_values(module: nn.Module) -> dict[int, Tensor]:
    """Return the values of attributes that have a graph, which torch can't copy, by the id of the tensor."""
    attributes = (value for layer in module.modules() for value in vars(layer).values())
    return {id(value): value.detach() for value in attributes if isinstance(value, Tensor) and not value.is_leaf}


def copied(module: nn.Module) -> nn.Module:
    """Return a deep copy of a module; what its layers have computed is copied without its graph."""
    return copy.deepcopy(module, {key: value.clone() for key, value in computed_values(module).items()})


def without_memory(module: nn.Module, tensors: Iterable[Tensor]) -> nn.Module:
    """Return a deep copy of a module in which some parameters and buffers are on the meta device."""
    memo: dict[int, Any] = {key: value.to("meta") for key, value in computed_values(module).items()}
    for tensor in tensors:
        empty = tensor.detach().to("meta")
        memo[id(tensor)] = Parameter(empty, tensor.requires_grad) if isinstance(tensor, Parameter) else empty
    return copy.deepcopy(module, memo)
