"""Checks of a script on several processes, for what would train other weights on each rank, or the same N times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unitrain import call_site
from unitrain.communication.communicator import Communicator
from unitrain.errors import UsageError

_LOSSES = 3


class CopyCheck:
    """Compares the ranks' first losses, and warns if they are equal bit for bit: N copies of one job.

    Attributes:
        pending: whether further losses need to be compared.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._checks_left = _LOSSES
        self.pending: bool = True

    def compare(self, losses: Sequence[Tensor]) -> None:
        """Compare the losses of a step. Collective."""
        device = self._communicator.device
        ranks = self._communicator.all_gather(torch.stack([loss.detach().to(device, torch.float64) for loss in losses]))
        equal = bool((ranks == ranks[0]).all())
        self._checks_left -= 1
        self.pending = equal and self._checks_left > 0
        if equal and not self.pending and self._communicator.is_main:
            call_site.warn(
                f"the first {_LOSSES} losses are equal on all {self._communicator.world_size} ranks, which seem to "
                "train on the same samples, at no gain in speed. Use strategy.dataloader, which shards the dataset."
            )


class DirectStepCheck:
    """Refuses steps of optimizers of prepared parameters that are not made by the strategy.

    Attributes:
        allowed: whether the strategy is making a step.
    """

    def __init__(self, is_prepared: Callable[[Parameter], bool]) -> None:
        self.allowed: bool = False
        self._is_prepared = is_prepared
        self._harmless: WeakSet[Optimizer] = WeakSet()
        self._hook = register_optimizer_step_pre_hook(self._check)

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.allowed or optimizer in self._harmless:
            return
        if any(self._is_prepared(p) for group in optimizer.param_groups for p in group["params"]):
            raise UsageError(
                "optimizer.step() was called for a prepared model. With several processes, gradients are averaged, "
                "clipped and checked in strategy.step(loss, optimizer), or in strategy.backward and strategy.update: "
                "call these instead of loss.backward() and optimizer.step()."
            )
        self._harmless.add(optimizer)

    def close(self) -> None:
        """Remove the check."""
        self._hook.remove()
