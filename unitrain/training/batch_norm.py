"""Synchronised BatchNorm: statistics over the global batch, with any backend, on CPU and GPU.

Each rank computes the mean, variance and count of its part of the batch. One all-gather collects them, and they are
merged in float64 by the pairwise formula of Chan, Golub and LeVeque ("Algorithms for computing the sample variance",
1983). The parts may be uneven or empty. The backward needs one all-reduce. Both block, since there is no other work to
overlap them with. The passes over the batch itself use torch's kernels for given statistics, those of eval mode.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from unitrain.communicator import Communicator
from unitrain.data.loop import BatchInUse
from unitrain.errors import ConfigError


class _SyncedNormalise(torch.autograd.Function):
    """Normalise (rows, channels, ...) by statistics over the rows of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: SyncBatchNorm
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        channels = x.size(1)
        kind = _computed_in(x)
        stand_in = layer.in_use.is_stand_in
        count = x.numel() // channels if channels and not stand_in else 0
        local = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
        if count:
            variance, mean = torch.var_mean(x.to(kind), [d for d in range(x.dim()) if d != 1], correction=0)
            local[:channels] = mean
            local[channels : 2 * channels] = variance
            local[-1] = count
        with layer.communicator.pulse.within(layer.sync_name):
            gathered = layer.communicator.all_gather_async(local, f"{layer.sync_name}.forward")()
        means, variances, counts = gathered[:, :channels], gathered[:, channels:-1], gathered[:, -1:]
        total = counts.sum()
        if count <= 1 and total.item() <= 1:
            raise ValueError(f"BatchNorm needs more than 1 value per channel over all ranks in training, got {x.shape}")
        share = counts / total.clamp(min=1)
        mean = (means * share).sum(0)
        variance = ((variances + (means - mean) ** 2) * share).sum(0)
        statistics = mean.to(kind), variance.to(kind)
        ctx.save_for_backward(x, weight, *statistics, total)
        ctx.layer, ctx.counts = layer, count > 0
        ctx.mark_non_differentiable(mean, variance, total)
        # With given statistics, as in eval mode, torch's kernel needs a single pass.
        output = batch_norm(x, *statistics, _to(weight, kind), _to(bias, kind), eps=layer.eps)
        return output, mean, variance, total

    @staticmethod
    @once_differentiable  # a second derivative would be wrong: autograd does not see the all-reduce
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, mean, variance, total = ctx.saved_tensors
        layer, kind, channels, needs = ctx.layer, mean.dtype, x.size(1), ctx.needs_input_grad
        if ctx.counts:
            # The gradients for given statistics. That of the input lacks the part through the statistics.
            grad_input, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
                grad.to(kind), x.to(kind), _to(weight, kind), mean, variance, None, None, False, layer.eps,
                [needs[0], True, True],
            )  # fmt: skip
        else:
            # Without rows, or for a stand-in: its gradient is 0, and nothing depends on its statistics.
            grad_input, grad_weight, grad_bias = torch.zeros_like(x, dtype=kind), *torch.zeros(2, channels).to(mean)
        sums = torch.cat([grad_bias, grad_weight]).double()
        layer.communicator.all_reduce_async(sums, "sum", f"{layer.sync_name}.backward")()
        if needs[0] and ctx.counts:
            inverse_std = torch.rsqrt(variance + layer.eps)
            scale = inverse_std if weight is None else inverse_std * weight.to(kind)
            by_bias, by_weight = (sums / total).to(kind).neg_().mul_(scale.repeat(2)).split(channels)
            shape = [1, channels] + [1] * (x.dim() - 2)
            centred = x.to(kind) - mean.view(shape)
            grad_input.addcmul_(centred, (by_weight * inverse_std).view(shape)).add_(by_bias.view(shape))
        return (
            grad_input.to(x.dtype) if needs[0] else None,
            grad_weight.to(weight.dtype) if weight is not None and needs[1] else None,
            grad_bias.to(weight.dtype) if weight is not None and needs[2] else None,
            None,
        )


def _computed_in(x: Tensor) -> torch.dtype:
    """Return the dtype to compute in: at least float32, since half-precision sums would be too inexact."""
    return x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


class SyncBatchNorm(_BatchNorm):
    """A BatchNorm layer whose training statistics are computed over the rows of all ranks.

    Made by ``synchronise`` from an existing layer, whose parameters, buffers, hooks and state dict keys it keeps.
    """

    plain: ClassVar[type[_BatchNorm]]
    communicator: Communicator
    in_use: BatchInUse
    sync_name: str

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """Normalise ``input`` (rows, channels, ...) by statistics over all ranks, or the running ones in eval mode."""
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if not self.training or self.communicator.world_size == 1:
            return self.plain.forward(self, input)
        self.communicator.compare_calls(f"forward of {self.sync_name}")
        output, mean, variance, total = _SyncedNormalise.apply(input, self.weight, self.bias, self)
        if self.track_running_stats:
            self._update_running(mean, variance, total)
        return cast(Tensor, output)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor, total: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked.double()
        unbiased = variance * (total / (total - 1).clamp(min=1))
        self.running_mean.add_(momentum * (mean.to(self.running_mean.dtype) - self.running_mean))
        self.running_var.add_(momentum * (unbiased.to(self.running_var.dtype) - self.running_var))


class SyncBatchNorm1d(SyncBatchNorm, nn.BatchNorm1d):
    """``BatchNorm1d`` over all ranks."""

    plain: ClassVar[type[_BatchNorm]] = nn.BatchNorm1d


class SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    """``BatchNorm2d`` over all ranks."""

    plain: ClassVar[type[_BatchNorm]] = nn.BatchNorm2d


class SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d):
    """``BatchNorm3d`` over all ranks."""

    plain: ClassVar[type[_BatchNorm]] = nn.BatchNorm3d


class _ReplacesTorchs(SyncBatchNorm):
    """torch's own ``SyncBatchNorm``, which needs GPUs and torch.distributed, on any device and backend."""

    plain: ClassVar[type[_BatchNorm]] = nn.SyncBatchNorm

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        if not self.training or self.communicator.world_size == 1:
            return _BatchNorm.forward(self, input)
        return super().forward(input)

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  (torch's name)
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


_SYNCED: dict[type, type[SyncBatchNorm]] = {
    c.plain: c for c in (SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d, _ReplacesTorchs)
}


def _synced(plain: type) -> type[SyncBatchNorm] | None:
    """Return the synchronised class of a BatchNorm class; None for a derived class, whose forward may be different."""
    timm = sys.modules.get("timm.layers")
    if timm is not None and plain is timm.BatchNormAct2d and plain not in _SYNCED:
        _SYNCED[plain] = type("SyncBatchNormAct2d", (_SyncBatchNormAct2d,), {"plain": plain})
    return _SYNCED.get(plain)


class _SyncBatchNormAct2d(SyncBatchNorm2d):
    """timm's ``BatchNormAct2d``, which is followed by a dropout and an activation, over all ranks."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        normalised = super().forward(input)
        if not self.training or self.communicator.world_size == 1:
            return normalised  # by timm's own forward
        return cast(Tensor, self.act(self.drop(normalised)))


def is_unsynchronised(layer: nn.Module) -> bool:
    """Return whether a layer is a BatchNorm whose running statistics differ between ranks."""
    return isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm)


def synchronise(
    module: nn.Module, communicator: Communicator, in_use: BatchInUse, *, only_torchs: bool = False
) -> None:
    """Make every BatchNorm layer in ``module`` compute its training statistics over all ranks, in place.

    Only the class of a layer changes: its parameters, buffers, hooks and state dict keys stay the same.

    Args:
        module: the module.
        communicator: the communicator of this process.
        in_use: the batch that the script works on: the rows of a stand-in don't count.
        only_torchs: replace torch's own ``SyncBatchNorm`` layers, and no others.

    Raises:
        ConfigError: a layer is of a subclass of BatchNorm, whose forward may be different, or synchronises over a
            process group of its own.
    """
    for name, layer in module.named_modules():
        if not is_unsynchronised(layer) or (only_torchs and type(layer) is not nn.SyncBatchNorm):
            continue
        if getattr(layer, "process_group", None) is not None:
            raise ConfigError(
                f"layer {name!r} synchronises over a process group of its own, which is not supported: create it "
                "without process_group."
            )
        synced = _synced(type(layer))
        if synced is None:
            raise ConfigError(
                f"sync_batchnorm does not support layer {name!r} of class {type(layer).__name__}: it supports only "
                "BatchNorm1d, BatchNorm2d, BatchNorm3d and timm's BatchNormAct2d. Replace the layer, or set "
                "sync_batchnorm to false."
            )
        layer.__class__ = synced
        layer.__dict__.update(communicator=communicator, in_use=in_use, sync_name=f"batch_norm.{name}")


def revert(module: nn.Module) -> None:
    """Undo ``synchronise`` in place, keeping the statistics."""
    for layer in module.modules():
        if isinstance(layer, SyncBatchNorm):
            del layer.communicator, layer.in_use, layer.sync_name
            layer.__class__ = layer.plain  # type: ignore[assignment]


class _StandInHooks:
    """Forward hooks that run an unsynchronised layer in eval mode on a stand-in.

    One sample can be too few for statistics, and is not one of this rank.
    """

    def __init__(self, in_use: BatchInUse | None = None) -> None:
        self._in_use = in_use
        self._was_training = False

    def before(self, layer: nn.Module, args: Any) -> None:
        self._was_training = layer.training
        if self._in_use is not None and self._in_use.is_stand_in:
            layer.training = False

    def after(self, layer: nn.Module, args: Any, output: Any) -> None:
        layer.training = self._was_training

    def __reduce__(self) -> tuple[type[_StandInHooks], tuple[()]]:
        return _StandInHooks, ()


def ignore_stand_ins(modules: Iterable[nn.Module], in_use: BatchInUse) -> None:
    """Keep stand-ins out of the statistics of layers that are not synchronised."""
    for module in modules:
        for layer in module.modules():
            if is_unsynchronised(layer):
                hooks = _StandInHooks(in_use)
                layer.register_forward_pre_hook(hooks.before)
                layer.register_forward_hook(hooks.after, always_call=True)


@torch.no_grad()
def average_statistics(modules: Iterable[nn.Module], communicator: Communicator) -> None:
    """Average the running means and variances of layers that are not synchronised over the ranks, in place."""
    buffers = [
        buffer
        for module in modules
        for layer in module.modules()
        if is_unsynchronised(layer)
        for buffer in (layer.running_mean, layer.running_var)
        if isinstance(buffer, Tensor)
    ]
    if communicator.world_size == 1 or not buffers:
        return
    flat = torch.cat([b.double().reshape(-1) for b in buffers])
    with communicator.pulse.within("averaging BatchNorm statistics"):
        communicator.all_reduce_async(flat, "sum", "batch_norm.statistics")()
    flat /= communicator.world_size
    for buffer, mean in zip(buffers, torch.split(flat, [b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))
