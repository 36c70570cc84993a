"""Which parameters FSDP can shard, and which it may gather in the dtype of autocast."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.nn import Parameter

_CONVERTED = frozenset(
    {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d}
)  # not their subclasses, which may use their weights in another way


def not_divisible(module: nn.Module) -> set[Parameter]:
    """Return the parameters that FSDP does not support: scalars, complex ones, trained ones of several dtypes."""
    dtypes = Counter[torch.dtype]()
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dim() and not parameter.is_complex():
            dtypes[parameter.dtype] += parameter.numel()
    most = dtypes.most_common(1)[0][0] if dtypes else None
    return {p for p in module.parameters() if not p.dim() or p.is_complex() or (p.requires_grad and p.dtype != most)}


def converted_by_autocast(module: nn.Module) -> set[Parameter]:
    """Return the parameters that autocast converts wherever they are used, in linear layers and convolutions."""
    converted: dict[Parameter, bool] = {}
    for layer in module.modules():
        is_one = type(layer) in _CONVERTED
        for parameter in layer.parameters(recurse=False):
            converted[parameter] = is_one and converted.get(parameter, True)
    return {parameter for parameter, is_one in converted.items() if is_one}
