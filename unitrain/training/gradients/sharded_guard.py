"""The optimizer's step and the loss scale of fp16 with sharded gradients: all ranks check and clip them identically."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from unitrain.communication.communicator import Communicator
from unitrain.device import by_device
from unitrain.training.gradients.guard import GuardedStep


class ShardedGuardedStep(GuardedStep):
    """A ``GuardedStep`` that is given the local parts of gradients. Collective.

    The check whether all are finite, or their norm, takes one all-reduce of one element in a step.

    Args:
        communicator: sums the squares of norms, and takes the maximum of the flags.
        limits: the other arguments of ``GuardedStep``. A norm is of the whole gradients.
    """

    def __init__(self, communicator: Communicator, *limits: Any) -> None:
        self._collectives, self._sharding = communicator.collectives, communicator.sharding
        super().__init__(communicator.device, *limits)

    def measure(self, *, for_verdicts: bool) -> None:
        """Ask ``forbids`` from now on, or not."""
        super().measure(for_verdicts=for_verdicts)
        self._only_checks = False  # all ranks agree in each check

    def gradients(self, parameters: Iterable[Parameter]) -> list[Tensor]:
        """Return this rank's parts of the gradients."""
        return [self._sharding.to_local(gradient) for gradient in super().gradients(parameters)]

    def _norm(self, parameters: Iterable[Parameter], gradients: list[Tensor]) -> Tensor:
        """Return the 2-norm over all ranks. Gradients that every rank has whole are counted once. Collective."""
        whole = [p.grad for p in parameters if p.grad is not None]
        pairs = list(zip(gradients, whole, strict=True))
        sharded = self._square([local for local, gradient in pairs if local is not gradient])
        replicated = self._square([local for local, gradient in pairs if local is gradient])
        self._collectives.all_reduce_async(sharded, "sum", "gradients.norm")()
        norm = (sharded / self._sharding.replicas + replicated).sqrt()
        return norm.to(gradients[0].dtype.to_real()) if gradients else norm.float()

    def _square(self, gradients: list[Tensor]) -> Tensor:
        """Return the square of the 2-norm of gradients on the device, in float64: it overflows float32."""
        device = self._collectives.device
        if not gradients:  # torch's norm of none is on the CPU, from where a copy would wait for the GPU
            return torch.zeros((), dtype=torch.float64, device=device)
        return get_total_norm(gradients).to(device, torch.float64).square()

    def _scale(self, parameters: Iterable[Parameter], gradients: list[Tensor], limit: float, norm: Tensor) -> None:
        """Scale the local parts, which torch's function takes only from whole parameters."""
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)  # as torch's clip_grads_with_norm_
        for same in by_device(gradients):
            torch._foreach_mul_(same, factor.to(same[0].device))

    def _check(self, gradients: list[Tensor], losses: Sequence[Tensor]) -> None:
        """Set the flag to 1 if a gradient or a loss is non-finite on any rank."""
        super()._check(gradients, losses)
        self._collectives.all_reduce_async(self._flag, "max", "gradients.found")()


def guard_for(communicator: Communicator, clip_norm: float | None, forbids: Callable[[float], bool]) -> GuardedStep:
    """Make the guard of a run, with the arguments of ``GuardedStep``."""
    if communicator.sharding.of_parameters:
        return ShardedGuardedStep(communicator, clip_norm, forbids)
    return GuardedStep(communicator.device, clip_norm, forbids)


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
