"""torch's DistributedDataParallel with checks and error messages for common mistakes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unitrain.errors import UsageError


class AveragingModule(DistributedDataParallel):
    """DistributedDataParallel that raises errors for gradients that would not be averaged.

    A deep copy of it (for an average of the weights, say) is a copy of the original module, without the wrapper.

    Attributes:
        calls: number of forwards whose backward averages gradients; torch averages in the first backward after each.
    """

    calls: int = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        module: nn.Module = copy.deepcopy(self.module, memo)
        return module

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run the forward of the module; its backward averages the gradients."""
        if self.require_backward_grad_sync and torch.is_grad_enabled():
            self.calls += 1
        try:
            return super().forward(*inputs, **keywords)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "Expected to have finished reduction" not in str(error):
                raise
            raise UsageError(
                "some parameters were not used in computing the loss of the previous backward, but DDP waits for the "
                "gradients of all: add the losses and call step() once, set ddp.find_unused_parameters to true, or "
                "freeze the parameters before prepare()."
            ) from error

    def check_called(self, before: int) -> None:
        """Check that gradients were averaged, which needs a forward of this wrapper.

        Args:
            before: ``calls`` at the end of the previous step.

        Raises:
            UsageError: there are gradients, but there was no forward.
        """
        if self.calls > before or not self.require_backward_grad_sync:  # averaging is off in benchmarks
            return
        name = next((n for n, p in self.module.named_parameters() if p.grad is not None), None)
        if name is not None:
            raise UsageError(
                f"{name} has a gradient that DDP did not average over the ranks, since its wrapper was not called. "
                "Call the model that prepare() returned (model = strategy.prepare(model)), not the original module."
            )
