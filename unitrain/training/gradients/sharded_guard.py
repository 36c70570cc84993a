"""The optimizer's step with sharded gradients: all ranks check and clip them identically."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm

from unitrain.communication.communicator import Communicator
from unitrain.training.gradients.guard import GuardedStep


class ShardedGuardedStep(GuardedStep):
    """A ``GuardedStep`` that is given the local parts of gradients. Collective.

    The check whether all are finite, or their norm, takes one all-reduce of one element in a step.

    Args:
        communicator: sums the squares of norms, and takes the maximum of the flags.
        clip_norm: see ``GuardedStep``; the norm is that of the whole gradients.
        clip_value: see ``GuardedStep``.
        forbids: see ``GuardedStep``.
    """

    def __init__(
        self,
        communicator: Communicator,
        clip_norm: float | None,
        clip_value: float | None,
        forbids: Callable[[float], bool] | None = None,
    ) -> None:
        self._collectives, self._sharding = communicator.collectives, communicator.sharding
        super().__init__(communicator.device, clip_norm, clip_value, forbids)
        self._in_memory = GuardedStep(torch.device("cpu"), None, None) if communicator.sharding.offloads else None

    def measure(self, *, for_verdicts: bool) -> None:
        """Ask ``forbids`` from now on, or not."""
        super().measure(for_verdicts=for_verdicts)
        # Offloaded shards are checked and stepped in host memory, where no optimizer reads a flag on the GPU.
        self._may_flag = self._may_flag and not self._sharding.offloads

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
        by_kind = defaultdict(list)  # foreach kernels are fast for tensors of one dtype and device
        for gradient in gradients:
            by_kind[gradient.dtype, gradient.device].append(gradient)
        for same in by_kind.values():
            torch._foreach_mul_(same, factor.to(same[0].device))

    def _check(self, gradients: list[Tensor], losses: Sequence[Tensor]) -> None:
        """Set the flag to 1 if a gradient or a loss is non-finite on any rank."""
        if self._in_memory is not None:
            offloaded = [gradient for gradient in gradients if gradient.device.type == "cpu"]
            gradients = [gradient for gradient in gradients if gradient.device.type != "cpu"]
            if not self._in_memory._are_finite(offloaded, []):
                self._flag.fill_(1.0)
        super()._check(gradients, losses)
        self._collectives.all_reduce_async(self._flag, "max", "gradients.found")()


def guard_for(
    communicator: Communicator,
    clip_norm: float | None,
    clip_value: float | None,
    forbids: Callable[[float], bool],
) -> GuardedStep:
    """Make the guard of a run, with the arguments of ``GuardedStep``."""
    if communicator.sharding.of_parameters:
        return ShardedGuardedStep(communicator, clip_norm, clip_value, forbids)
    return GuardedStep(communicator.device, clip_norm, clip_value, forbids)
