"""Copies of sharded modules: torch can't deep-copy them, so a copy without weights is made before they are sharded."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn import Parameter

from unitrain.errors import UsageError
from unitrain.module_copy import computed_values

from .shards import full_tensor


def without_weights(module: nn.Module) -> nn.Module:
    """Return a deep copy of a module with parameters and buffers on the meta device."""
    memo: dict[int, Any] = {id(p): Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()}
    memo.update({id(buffer): buffer.detach().to("meta") for buffer in module.buffers()})
    memo.update({key: value.to("meta") for key, value in computed_values(module).items()})  # until the next forward
    return copy.deepcopy(module, memo)


def filled(skeleton: nn.Module, module: nn.Module) -> nn.Module:
    """Return a copy of a module without weights, with those of a sharded one, on the CPU. Collective."""
    now: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    memo: dict[int, Any] = {}
    for name, parameter in skeleton.named_parameters():
        memo[id(parameter)] = Parameter(full_tensor(now[name].detach()).cpu().clone(), now[name].requires_grad)
    for name, buffer in skeleton.named_buffers():
        memo[id(buffer)] = now[name].detach().cpu().clone()
    return copy.deepcopy(skeleton, memo)


def refuse_copy(module: nn.Module, memo: dict[int, Any]) -> NoReturn:
    """Raise UsageError. This is what a deep copy of a sharded module calls."""
    raise UsageError(
        "a sharded model can't be deep-copied: use strategy.ema(model) for an average of its weights, and "
        "strategy.export(model) for a whole copy."
    )
