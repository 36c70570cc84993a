"""torch's DistributedDataParallel, with messages for what would go wrong in silence, or in terms of its own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unitrain.errors import UsageError


class AveragingModule(DistributedDataParallel):
    """torch's wrapper, which says what would go wrong in silence.

    A deep copy of it (an average of the weights, say) is one of the user's module alone.

    Attributes:
        calls: forwards whose backward averages gradients; torch averages those of the first backward after each.
    """

    calls: int = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        module: nn.Module = copy.deepcopy(self.module, memo)
        return module

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the module, and average what the backward of it yields."""
        if self.require_backward_grad_sync and torch.is_grad_enabled():
            self.calls += 1
        try:
            return super().forward(*inputs, **keywords)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "Expected to have finished reduction" not in str(error):
                raise
            raise UsageError(
                "parameters took no part in the loss of the backward before, and DDP waits for all: add the losses and "
                "call step() once, set ddp.find_unused_parameters to true, or freeze them before prepare()."
            ) from error

    def check_called(self, before: int) -> None:
        """Refuse gradients that were never averaged.

        Args:
            before: ``calls`` at the end of the step before.

        Raises:
            UsageError: there was no call, but there are gradients.
        """
        if self.calls > before or not self.require_backward_grad_sync:  # disarmed: steps without averaging are measured
            return
        name = next((n for n, p in self.module.named_parameters() if p.grad is not None), None)
        if name is not None:
            raise UsageError(
                f"{name} has a gradient that DDP knows nothing of, so the ranks' would not be averaged. Before each "
                "step call what prepare() returned (model = strategy.prepare(model)), and not the module itself."
            )
