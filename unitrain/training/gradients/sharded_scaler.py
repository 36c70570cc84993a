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
        """Return for each device whether a gradient is non-finite on any rank. ``unscale_`` calls this. Collective."""
        # torch's method only reads the groups of the optimizer, so it can be given others, of local tensors.
        local: Any = SimpleNamespace(param_groups=[{"params": list(self._parts(optimizer))}])
        flags = super()._unscale_grads_(local, inv_scale, found_inf, allow_fp16)
        for flag in flags.values():
            # A step that one rank skips, and its smaller scale, must be the same on all.
            self._collectives.all_reduce_async(flag, "max", "gradients.overflow")()
        return flags

    def _parts(self, optimizer: Optimizer) -> Iterator[Tensor]:
        """Yield this rank's parts of the parameters with gradients; the ``grad`` of each is the gradient's part."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    part = self._sharding.to_local(parameter.detach())
                    part.grad = self._sharding.to_local(parameter.grad)
                    yield part
