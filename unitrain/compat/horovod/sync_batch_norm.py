"""BatchNorm over the batches of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from unitrain.compat.horovod.collectives import Sum, allreduce
from unitrain.compat.horovod.world import size
from unitrain.training.models.batch_norm import GlobalBatchNorm


class SyncBatchNorm(GlobalBatchNorm):
    """A BatchNorm layer that normalises by the rows of all ranks, which may have different numbers. On any device."""

    num_batches_tracked: Tensor
    running_mean: Tensor
    running_var: Tensor

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  (torch's name)
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """Normalise ``input`` (rows, channels, ...); in eval mode, by the running statistics."""
        if size() == 1 or not (self.training or self.running_mean is None):
            return super().forward(input)
        self._check_input_dim(input)
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        rows, shape = [d for d in range(x.dim()) if d != 1], [1, -1] + [1] * (x.dim() - 2)
        # Its gradients, too, come from all ranks: allreduce is differentiable.
        sums = torch.cat([x.sum(rows), x.new_full([1], x.numel() // self.num_features)])
        sums = allreduce(sums, name="sync_batch_norm.sums", op=Sum)
        total = sums[-1].detach()
        mean = sums[:-1] / total
        centred = x - mean.view(shape)
        # In a second pass, since the squares of values far from 0 would lose digits.
        variance = allreduce(centred.square().sum(rows), name="sync_batch_norm.squares", op=Sum) / total
        if self.training and self.running_mean is not None:
            self._update_running(mean.detach(), variance.detach() * (total / (total - 1)))
        output: Tensor = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(input.dtype)

    def _update_running(self, mean: Tensor, variance: Tensor) -> None:
        self.num_batches_tracked += 1
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)
