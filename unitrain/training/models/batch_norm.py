"""BatchNorm and InstanceNorm layers with statistics that differ between ranks: averages, and stand-ins don't count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from unitrain.communication.communicator import Communicator
from unitrain.data.loop import CurrentBatch

_IGNORES = "unitrain_ignores_stand_ins"  # an attribute of layers


class GlobalBatchNorm(_BatchNorm):
    """Base class of BatchNorm layers whose running statistics are the same on all ranks, and leave stand-ins out."""

    @torch.no_grad()
    def update_running(self, mean: Tensor, variance: Tensor, total: Tensor) -> None:
        """Update the running statistics, if there are any.

        Args:
            mean: of each channel, over the rows of all ranks.
            variance: likewise, without Bessel's correction.
            total: the number of these rows.
        """
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked.double()
        # Bessel's correction, as in torch's running variance.
        unbiased = variance * (total / (total - 1).clamp(min=1))
        self.running_mean.add_(momentum * (mean.to(self.running_mean.dtype) - self.running_mean))
        self.running_var.add_(momentum * (unbiased.to(self.running_var.dtype) - self.running_var))


def has_statistics(layer: nn.Module) -> bool:
    """Return whether a layer is one that may have running statistics: BatchNorm or InstanceNorm."""
    return isinstance(layer, (_BatchNorm, _InstanceNorm))


def is_unsynchronised(layer: nn.Module) -> bool:
    """Return whether the running statistics of a layer, BatchNorm or InstanceNorm, differ between ranks."""
    return has_statistics(layer) and not isinstance(layer, GlobalBatchNorm)


def _unsynchronised(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the layers in modules that are not synchronised."""
    for module in modules:
        yield from filter(is_unsynchronised, module.modules())


class _StandInHooks:
    """Forward hooks that run an unsynchronised layer in eval mode on a stand-in, which is not a sample of this rank."""

    def __init__(self, current_batch: CurrentBatch | None = None) -> None:
        self._current_batch = current_batch
        self._was_training = False

    def before(self, layer: nn.Module, args: Any) -> None:
        self._was_training = layer.training
        if self._current_batch is not None and self._current_batch.is_stand_in:
            layer.training = False

    def after(self, layer: nn.Module, args: Any, output: Any) -> None:
        layer.training = self._was_training

    def __reduce__(self) -> tuple[type[_StandInHooks], tuple[()]]:
        return _StandInHooks, ()


def ignore_stand_ins(modules: Iterable[nn.Module], current_batch: CurrentBatch) -> None:
    """Keep stand-ins out of the statistics of layers that are not synchronised. A second call does nothing."""
    for layer in _unsynchronised(modules):
        if _IGNORES not in vars(layer):
            vars(layer)[_IGNORES] = True  # a deep copy has it too, as it has the hooks
            hooks = _StandInHooks(current_batch)
            layer.register_forward_pre_hook(hooks.before)
            layer.register_forward_hook(hooks.after, always_call=True)  # also after an error in the forward


@torch.no_grad()
def average_statistics(modules: Iterable[nn.Module], communicator: Communicator, shares: tuple[int, ...]) -> None:
    """Average the running means and variances of layers that are not synchronised over the ranks, in place.

    A rank weighs as much as the share of the samples that it trains on.
    """
    statistics = [b for layer in _unsynchronised(modules) for b in (layer.running_mean, layer.running_var)]
    buffers = [buffer for buffer in statistics if isinstance(buffer, Tensor)]
    if communicator.world_size == 1 or not buffers:
        return
    # One call for all layers, in float64, so that each rank's share keeps its digits.
    flat = torch.cat([b.double().reshape(-1).to(communicator.device) for b in buffers]) * shares[communicator.rank]
    with communicator.collectives.pulse.within("averaging BatchNorm statistics"):
        communicator.collectives.all_reduce_async(flat, "sum", "batch_norm.statistics")()
    flat /= sum(shares)
    for buffer, mean in zip(buffers, torch.split(flat, [b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))
