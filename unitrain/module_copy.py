"""Deep copies of modules whose layers keep what they have computed: ``weight_norm``'s weight, an attention map."""

from __future__ import annotations

import copy

from torch import Tensor, nn


def computed_values(module: nn.Module) -> dict[int, Tensor]:
    """Return the values of attributes that have a graph, which torch can't copy, by the id of the tensor."""
    attributes = (value for layer in module.modules() for value in vars(layer).values())
    return {id(value): value.detach() for value in attributes if isinstance(value, Tensor) and not value.is_leaf}


def copied(module: nn.Module) -> nn.Module:
    """Return a deep copy of a module; what its layers have computed is copied without its graph."""
    return copy.deepcopy(module, {key: value.clone() for key, value in computed_values(module).items()})
