"""The arithmetic of synchronised BatchNorm.

Each rank computes the mean, variance and count of its part of the batch. One all-gather collects them, and they are
merged in float64 by the pairwise formula of Chan, Golub and LeVeque ("Algorithms for computing the sample variance",
1983). The parts may be uneven or empty. The backward needs one all-reduce. Both block, since there is no other work to
overlap them with. The passes over the batch itself use torch's kernels for given statistics, as eval mode does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import batch_norm

from unitrain.communication.communicator import Communicator
from unitrain.data.loop import CurrentBatch


class LayerContext:
    """The parts of the run that a layer needs."""

    def __init__(self, communicator: Communicator, current_batch: CurrentBatch) -> None:
        self.communicator: Communicator = communicator
        self.current_batch: CurrentBatch = current_batch

    # Compilers may reorder operators that don't depend on each other, and differently for batches of another size. But
    # communication libraries match collectives by their order. So graphs end here.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def normalise(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, name: str
    ) -> tuple[Tensor, BatchStatistics]:
        """Normalise (rows, channels, ...) by statistics over the rows of all ranks. Collective.

        ValueError is raised on all ranks if there is only one value per channel.
        """
        statistics = gather_statistics(x, self, name)
        output: Tensor = _Normalise.apply(x, weight, bias, eps, statistics, self, name)
        return output, statistics

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerContext:
        """Return this object: a copy of a model runs on the same ranks."""
        return self


class BatchStatistics(NamedTuple):
    """Statistics of a batch over all ranks, and the number of rows of this rank."""

    mean: Tensor
    """Mean of each channel over the rows of all ranks, in float64."""
    variance: Tensor
    """Variance of each channel, without Bessel's correction, in float64."""
    total: Tensor
    """Number of rows of all ranks, as a float64."""
    local: int
    """Number of rows of this rank; 0 for a stand-in."""


@torch.no_grad()
def gather_statistics(x: Tensor, ranks: LayerContext, name: str) -> BatchStatistics:
    """Return the statistics over the rows of all ranks. Collective."""
    channels = x.size(1)
    count = x.numel() // channels if channels and not ranks.current_batch.is_stand_in else 0
    local = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    if count:
        rows = [d for d in range(x.dim()) if d != 1]
        variance, mean = torch.var_mean(x.to(_computed_in(x)), rows, correction=0)
        local[:channels] = mean
        local[channels : 2 * channels] = variance
        local[-1:] = count  # older torch sets a single element by a copy from the host, which waits for the GPU
    ranks.communicator.collectives.compare_calls(f"forward of {name}")
    with ranks.communicator.collectives.pulse.within(name):
        local = local.to(ranks.communicator.device)  # the layer may be on another one
        gathered = ranks.communicator.collectives.all_gather_async(local, f"{name}.forward")().to(x.device)
    means, variances, counts = gathered[:, :channels], gathered[:, channels:-1], gathered[:, -1:]
    total = counts.sum()
    if count <= 1 and total.item() <= 1:
        raise ValueError(f"BatchNorm needs more than 1 value per channel over all ranks in training, got {x.shape}")
    share = counts / total.clamp(min=1)
    mean = (means * share).sum(0)
    variance = ((variances + (means - mean) ** 2) * share).sum(0)
    return BatchStatistics(mean, variance, total, count)


class _Normalise(torch.autograd.Function):
    """Normalises by given statistics, with a gradient through the statistics as well."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        statistics: BatchStatistics,
        ranks: LayerContext,
        name: str,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.others = statistics, eps, ranks, name
        kind = _computed_in(x)
        mean, variance = statistics.mean.to(kind), statistics.variance.to(kind)
        # With given statistics, as in eval mode, torch's kernel needs a single pass.
        return batch_norm(x, mean, variance, _to(weight, kind), _to(bias, kind), eps=eps)

    @staticmethod
    @once_differentiable  # a second derivative would be wrong: autograd does not see the all-reduce
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        statistics, eps, ranks, name = ctx.others
        of_input, of_weight, of_bias, *others = ctx.needs_input_grad
        kind, channels = _computed_in(x), x.size(1)
        mean, variance = statistics.mean.to(kind), statistics.variance.to(kind)
        if statistics.local:
            # The gradients for given statistics. That of the input lacks the part through the statistics. Empty tensors
            # say that nothing was saved: CUDA's kernel for channels_last, and without a gradient of the input, takes no
            # None.
            unsaved = mean.new_empty(0)
            grad_input, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
                grad.to(kind), x.to(kind), _to(weight, kind), mean, variance, unsaved, unsaved, False, eps,
                [of_input, True, True],
            )  # fmt: skip
        else:
            # Without rows, or for a stand-in: its gradient is 0, and nothing depends on its statistics.
            grad_input = torch.zeros_like(x, dtype=kind)
            grad_weight, grad_bias = torch.zeros_like(mean), torch.zeros_like(mean)
        sums = torch.cat([grad_bias, grad_weight]).double().to(ranks.communicator.device)
        ranks.communicator.collectives.all_reduce_async(sums, "sum", f"{name}.backward")()
        sums = sums.to(x.device)
        if of_input and statistics.local:
            inverse_std = torch.rsqrt(variance + eps)
            scale = inverse_std if weight is None else inverse_std * weight.to(kind)
            by_bias, by_weight = (sums / statistics.total).to(kind).neg_().mul_(scale.repeat(2)).view(2, channels)
            shape = [1, channels] + [1] * (x.dim() - 2)
            centred = x.to(kind) - mean.view(shape)
            grad_input.addcmul_(centred, (by_weight * inverse_std).view(shape)).add_(by_bias.view(shape))
        return (
            grad_input.to(x.dtype) if of_input else None,
            grad_weight.to(weight.dtype) if of_weight else None,
            grad_bias.to(weight.dtype) if of_bias else None,
            *(None for _ in others),
        )


def _computed_in(x: Tensor) -> torch.dtype:
    """Return the dtype to compute in: at least float32, since half-precision sums would be too inexact."""
    return x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
