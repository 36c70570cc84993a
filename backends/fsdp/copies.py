"""Copies of sharded modules, which torch can't deep-copy: a copy without memory, made before, is filled."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn import Parameter

from unitrain.errors import UsageError

from .shards import full_tensor


def filled(skeleton: nn.Module, module: nn.Module) -> nn.Module:
    """Return a copy, on the CPU, of a module without weights, with the weights of a sharded one. Collective."""
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
