"""BatchNorm over the batches of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unitrain.compat.horovod.collectives import Sum, allreduce
from unitrain.training.models.batch_norm import GlobalBatchNorm


class SyncBatchNorm(GlobalBatchNorm, nn.SyncBatchNorm):
    """A BatchNorm layer that normalises by the rows of all ranks, which may have different numbers. On any device."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """Normalise ``input`` (rows, channels, ...); in eval mode, by the running statistics."""
        if not self.training and self.running_mean is not None:
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
        if self.training:
            self.update_running(mean, variance, total)
        output: Tensor = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(input.dtype)
