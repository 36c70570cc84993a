"""torch's DistributedDataParallel with checks and error messages for common mistakes."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unitrain.errors import UsageError
from unitrain.wrapper import Wrapper

# Newer releases of torch have renamed this argument, and deprecate the old name.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel.__init__).parameters
)


class AveragingModule(Wrapper, DistributedDataParallel):
    """DistributedDataParallel that raises errors for gradients that would not be averaged.

    The core synchronises parameters and buffers.

    Args:
        module: the module to wrap.
        **options: of DistributedDataParallel.

    Attributes:
        forwards: number of forwards that had a backward to come.
        calls: number of those with a backward that averages gradients; torch averages in the first backward after each.
    """

    forwards: int = 0
    calls: int = 0

    def __init__(self, module: nn.Module, **options: Any) -> None:
        options[_SYNC_BUFFERS] = False
        # The core has broadcast parameters and buffers already.
        super().__init__(module, init_sync=False, **options)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run the forward of the module; its backward averages the gradients.

        Raises:
            UsageError: the previous backward left gradients out that DDP still waits for.
        """
        # A forward of an evaluation has no backward.
        if torch.is_grad_enabled():
            self.forwards += 1
            self.calls += self.require_backward_grad_sync
        try:
            return super().forward(*inputs, **keywords)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "Expected to have finished reduction" not in str(error):
                raise
            raise UsageError(
                "some parameters were not used in the loss of the previous backward, but DDP waits for all gradients: "
                "add the losses and call step() once, set ddp.find_unused_parameters to true, or freeze them."
            ) from error

    def retire(self) -> None:
        """Leave the averaging of gradients to the caller, from the next backward on. Collective."""
        self.reducer._rebuild_buckets()  # else the next forward would, for which a rank may not come
        self._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        self.require_backward_grad_sync = False

    def has_averaged(self, forwards: int, calls: int) -> bool:
        """Return whether gradients were averaged: not if all forwards ran within the window, before its last backward.

        Nor if the script has called the original module only, in functional_call, for example.

        Args:
            forwards: the count at the end of the previous step.
            calls: the count at the end of the previous step.
        """
        if self.calls > calls:
            return True
        # Their backward accumulated only, or was of the original module. The caller averages after it.
        return self.forwards == forwards and all(p.grad is None for p in self.module.parameters())
