"""The arithmetic of synchronised BatchNorm, eager and as custom operators that ``torch.compile`` and export can trace.

Each rank computes the mean, variance and count of its part of the batch. One all-gather collects them, and they are
merged in float64 by the pairwise formula of Chan, Golub and LeVeque ("Algorithms for computing the sample variance",
1983). The parts may be uneven or empty. The backward needs one all-reduce. Both block, since there is no other work to
overlap them with. The passes over the batch itself use torch's kernels for given statistics, as eval mode does.

The eager path runs the same code without the operators: the dispatcher takes longer, and the first call of a custom
operator imports the compiler, which takes a second or more.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import batch_norm

from unitrain.communication.communicator import Communicator
from unitrain.data.loop import CurrentBatch

_keys = itertools.count()
_RANKS: weakref.WeakValueDictionary[int, LayerContext] = weakref.WeakValueDictionary()


class LayerContext:
    """The parts of the run that a layer needs.

    A compiled graph refers to it by its ``key``, since the arguments of a custom operator are tensors and plain values.
    What changes between steps, such as whether the batch is a stand-in, is thus read when the graph runs.
    """

    def __init__(self, communicator: Communicator, current_batch: CurrentBatch) -> None:
        self.communicator: Communicator = communicator
        self.current_batch: CurrentBatch = current_batch
        self.key: int = next(_keys)
        _RANKS[self.key] = self

    def normalise(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, name: str
    ) -> tuple[Tensor, BatchStatistics]:
        """Normalise (rows, channels, ...) by statistics over the rows of all ranks. Collective.

        ValueError is raised on all ranks if there is only one value per channel.
        """
        normalise = _normalise_op if torch.compiler.is_compiling() else _Normalise.apply
        output, *statistics = normalise(x, weight, bias, eps, self.key, name)
        return output, BatchStatistics(*statistics)

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
    local: Tensor
    """Number of rows of this rank, a tensor on the CPU; 0 for a stand-in."""


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
    return BatchStatistics(mean, variance, total, torch.as_tensor(count))


def _normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    kind = _computed_in(x)
    # With given statistics, as in eval mode, torch's kernel needs a single pass.
    return batch_norm(x, mean.to(kind), variance.to(kind), _to(weight, kind), _to(bias, kind), eps=eps)


def _gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    statistics: BatchStatistics,
    eps: float,
    ranks: LayerContext,
    name: str,
    *,
    of_input: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of the input (None unless ``of_input``), of the weight and of the bias. Collective."""
    kind, channels = _computed_in(x), x.size(1)
    mean, variance = statistics.mean.to(kind), statistics.variance.to(kind)
    if statistics.local:
        # The gradients for given statistics. That of the input lacks the part through the statistics. Empty tensors say
        # that nothing was saved: CUDA's kernel for channels_last, and without a gradient of the input, takes no None.
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
    parameters = x.dtype if weight is None else weight.dtype
    return grad_input.to(x.dtype) if of_input else None, grad_weight.to(parameters), grad_bias.to(parameters)


def _computed_in(x: Tensor) -> torch.dtype:
    """Return the dtype to compute in: at least float32, since half-precision sums would be too inexact."""
    return x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


# --------------------------------------------------------------------------------- eager, and as custom operators


def _normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, ranks: int, name: str
) -> tuple[Tensor, ...]:
    statistics = gather_statistics(x, _RANKS[ranks], name)
    return _normalised(x, weight, bias, statistics.mean, statistics.variance, eps), *statistics


_normalise_op = torch.library.custom_op(
    "unitrain::batch_norm",
    _normalise,
    mutates_args=(),
    schema="(Tensor x, Tensor? weight, Tensor? bias, float eps, int ranks, str name) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),
)


@_normalise_op.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    mean = x.new_empty(x.size(1), dtype=torch.float64)
    count = torch.empty((), dtype=torch.int64, device="cpu")
    return torch.empty_like(x), mean, torch.empty_like(mean), mean.new_empty(()), count


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    total: Tensor,
    count: Tensor,
    eps: float,
    ranks: int,
    name: str,
    of_input: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = BatchStatistics(mean, variance, total, count)
    grad_input, grad_weight, grad_bias = _gradients(
        grad, x, weight, statistics, eps, _RANKS[ranks], name, of_input=of_input
    )
    return x.new_empty(0) if grad_input is None else grad_input, grad_weight, grad_bias


_backward_op = torch.library.custom_op(
    "unitrain::batch_norm_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor variance, Tensor total, Tensor count, "
    "float eps, int ranks, str name, bool of_input) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),
)


@_backward_op.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    of_input = rest[-1]
    channels = (x if weight is None else weight).new_empty(x.size(1))
    return torch.empty_like(x) if of_input else x.new_empty(0), channels, torch.empty_like(channels)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _, *ctx.plain = inputs
    ctx.save_for_backward(x, weight, *output[1:])


def _gradients_by(backward: Callable[..., tuple[Tensor, ...]], ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    of_input, of_weight, of_bias, *others = ctx.needs_input_grad
    gradients = backward(grad, *ctx.saved_tensors, *ctx.plain, of_input)
    needed = zip(gradients, (of_input, of_weight, of_bias), strict=True)
    return *(gradient if is_needed else None for gradient, is_needed in needed), *(None for _ in others)


_normalise_op.register_autograd(
    lambda ctx, grad, *of_statistics: _gradients_by(_backward_op, ctx, grad), setup_context=_save
)


class _Normalise(torch.autograd.Function):
    """The same without the dispatcher and the compiler."""

    forward = staticmethod(_normalise)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[1:])
        ctx.ranks = _RANKS[inputs[4]]  # lives as long as the graph, which may be longer than the layer

    @staticmethod
    @once_differentiable  # a second derivative would be wrong: autograd does not see the all-reduce
    def backward(ctx: Any, grad: Tensor, *of_statistics: Any) -> tuple[Tensor | None, ...]:
        return _gradients_by(_backward, ctx, grad)


# Compilers may reorder operators that don't depend on each other, and differently for batches of another size. But
# communication libraries match collectives by their order. Older releases of torch can't be told: graphs end there.
if hasattr(_normalise_op, "register_effect"):
    for _op in (_normalise_op, _backward_op):
        _op.register_effect(torch.library.EffectType.ORDERED)  # type: ignore[attr-defined]
else:
    LayerContext.normalise = torch.compiler.disable(LayerContext.normalise)  # type: ignore[method-assign, no-untyped-call]
