"""Weighted means over the ranks, for a script that computes gradients itself, or needs values with a gradient.

Each call begins with a small exchange: the ranks compare what they give, and learn each other's weights, so that what
is wrong on one rank is an error on all. Then there is one all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from unitrain.communication.communicator import Communicator
from unitrain.communication.comparison import difference_between_ranks
from unitrain.communication.structure import refilled
from unitrain.errors import UsageError, by_rank
from unitrain.rng import derived_seed
from unitrain.training.loop.averaging import WAITING

T = TypeVar("T")


def average(ranks: Communicator, gradients: T, weight: float) -> T:
    """Return the mean of the ranks' gradients. See ``Strategy.average``.

    Args:
        ranks: the communicator of this process.
        gradients: a list, tuple or dict.
        weight: of this rank; NaN if it is not known.
    """
    if not isinstance(gradients, (list, tuple, Mapping)):
        raise UsageError(f"average() takes a list, tuple or dict of tensors, not {type(gradients).__name__}.")
    entries = gradients if isinstance(gradients, Mapping) else dict(enumerate(gradients))
    # Sorted, since a dict may have another order on another rank.
    tensors = {f"entry {key!r}": entries[key] for key in sorted(entries, key=repr)}
    means = _means(ranks, tensors, _weights(ranks, "average", tensors, weight))
    return cast(T, refilled(gradients, [means.get(f"entry {key!r}") for key in entries]))


def mean(ranks: Communicator, value: Tensor, count: float) -> Tensor:
    """Return the mean of the ranks' values, with its gradient. See ``Strategy.mean``; the arguments are as above."""
    # By another name, since all ranks take part in the backward, or none.
    with_graph = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
    tensors = {"the value with a gradient": value.detach()} if with_graph else {"the value": value}
    return cast(Tensor, _Mean.apply(value, ranks, _weights(ranks, "mean", tensors, count)))


class _Mean(torch.autograd.Function):
    """The mean of the ranks' values, each with its weight.

    The ranks' losses that follow from it have a mean, too. ``step`` has put their weights into the gradients that reach
    the backward, whose sum is then the derivative by the mean. Outside of it, the gradients have no weights yet, and
    ``average`` will weigh what the backward returns. So this is the mean of the gradients with the same weights.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: Communicator, weights: list[float]) -> Tensor:
        ctx.ranks, ctx.weights = ranks, weights
        return _means(ranks, {"": value}, weights)[""]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, None, None]:
        ranks, weights = ctx.ranks, ctx.weights
        if ranks.collectives.pulse.phase == WAITING:
            return ranks.all_reduce(grad) * (weights[ranks.rank] / sum(weights)), None, None
        return _Mean.apply(grad, ranks, weights), None, None


def _weights(ranks: Communicator, call: str, tensors: Mapping[str, Any], weight: float) -> list[float]:
    """Return the weights of all ranks. Collective.

    Args:
        ranks: the communicator of this process.
        call: name of the call, for messages.
        tensors: by their names.
        weight: of this rank.

    Raises:
        UsageError: tensors differ or have no mean, or weights have none; on every rank.
    """
    forms = {name: _form(ranks, tensor) for name, tensor in tensors.items()}
    # The upper bits of the digest are exact in float64.
    facts = torch.tensor([derived_seed(forms) >> 11, weight], dtype=torch.float64)
    digests, weights = ranks.all_gather(facts).T.tolist()
    if len(set(digests)) > 1 and (difference := difference_between_ranks(ranks, forms)):
        raise UsageError(
            f"{call}() needs the same tensors on all ranks, and zeros for a None of some ranks only, but "
            f"{' is '.join(difference)}."
        )
    for name, form in forms.items():
        if form.startswith("a "):
            raise UsageError(f"{call}() takes dense floating-point tensors without a graph, but {name} is {form}.")
    if not sum(weights) or not all(0 <= each < torch.inf for each in weights):
        raise UsageError(
            f"the weights in {call}() are {by_rank(enumerate(weights))}: pass the number of samples, or of tokens, on "
            "each rank; 0 on some ranks is allowed, but not on all. The default is nan if the script uses several "
            "batches of loaders that have different numbers of samples on this rank."
        )
    return cast(list[float], weights)


def _form(ranks: Communicator, tensor: Any) -> str:
    """Return the form of a tensor, as the ranks compare it; "a ..." if it has no mean."""
    if not isinstance(tensor, Tensor):
        return "None" if tensor is None else f"a {type(tensor).__name__}"
    if ranks.sharding.is_sharded(tensor):
        return "a shard: backward has averaged it over the ranks already, with equal weights"
    dtype, graph = str(tensor.dtype).removeprefix("torch."), "without" if tensor.grad_fn is None else "with"
    if tensor.layout != torch.strided or not tensor.is_floating_point() or graph == "with":
        return f"a {tensor.layout} {dtype} tensor {graph} a graph: pass its to_dense(), float() or detach()"
    return f"{dtype} {[*tensor.shape]}"


def _means(ranks: Communicator, tensors: Mapping[str, Any], weights: list[float]) -> dict[str, Tensor]:
    """Return the weighted means of the ranks' tensors, as new tensors, without those that are None. Collective."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    parts = [tensor.detach().reshape(-1).to(ranks.device) for tensor in present.values()]
    # In float32 at least: a sum in 16 bits may overflow where the mean does not.
    flat = torch.cat([torch.zeros(0, device=ranks.device, dtype=torch.float32), *parts])
    share = weights[ranks.rank] / sum(weights)
    # Without samples, there may be NaN.
    split = torch.split(ranks.all_reduce(flat.mul_(share) if share else flat.zero_()), [*map(len, parts)])
    means = zip(present.items(), split, strict=True)
    return {name: torch.empty_like(like).copy_(part.view(like.shape)) for (name, like), part in means}
