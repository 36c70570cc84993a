"""The loss scale of fp16 with sharded gradients: all ranks notice the overflow of one."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unitrain.communication.communicator import Communicator


class ShardedScaler(torch.amp.GradScaler):
    """A ``GradScaler`` that unscales the local parts of gradients. Collective: one all-reduce of one element.

    torch's own takes the gradients of an optimizer only if all are sharded, or none is. But what can't be sharded, such
    as a scalar, is whole on every rank.
    """

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator.device.type)
        self._collectives, self._sharding = communicator.collectives, communicator.sharding

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Return for each device whether a gradient is non-finite on any rank. ``unscale_`` calls this."""
        local: Any = SimpleNamespace(param_groups=[{"params": list(self._parts(optimizer))}])
        found = super()._unscale_grads_(local, inv_scale, found_inf, allow_fp16)
        for flag in found.values():
            self._collectives.all_reduce_async(flag, "max", "gradients.overflow")()
        return found

    def _parts(self, optimizer: Optimizer) -> Iterator[Tensor]:
        """Yield what this rank has of the parameters with gradients, and of the gradients."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    part = self._sharding.to_local(parameter.detach())
                    part.grad = self._sharding.to_local(parameter.grad)
                    yield part
