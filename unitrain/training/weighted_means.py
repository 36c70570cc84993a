"""``WeightedMeans``: means over the ranks of what a script computes itself: gradients, and values with a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from unitrain.communication.communicator import Communicator
from unitrain.communication.comparison import difference_between_ranks
from unitrain.communication.structure import refilled
from unitrain.errors import UsageError, by_rank
from unitrain.rng import derived_seed
from unitrain.training.loop.averaging import WAITING
from unitrain.training.loop.loop import TrainingLoop
from unitrain.training.windows.weights import Weight

T = TypeVar("T")


class WeightedMeans:
    """Computes weighted means over the ranks.

    Each call begins with a small exchange: the ranks compare what they give, and learn each other's weights, so that
    what is wrong on one rank is an error on all. Then there is one all-reduce.

    Args:
        communicator: sums over the ranks.
        loop: knows the batch that the script works on.

    Attributes:
        communicator: as the argument.
    """

    def __init__(self, communicator: Communicator, loop: TrainingLoop) -> None:
        self.communicator: Communicator = communicator
        self._loop = loop

    def average(self, gradients: T, weight: Weight | None) -> T:
        """See ``Strategy.average``."""
        if not isinstance(gradients, (list, tuple, Mapping)):
            raise UsageError(f"average() takes a list, tuple or dict of tensors, not {type(gradients).__name__}.")
        entries = gradients if isinstance(gradients, Mapping) else dict(enumerate(gradients))
        # Sorted, since a dict may have another order on another rank.
        tensors = {f"entry {key!r}": entries[key] for key in sorted(entries, key=repr)}
        means = self.means(tensors, self._weights("average", tensors, weight))
        averages: T = refilled(gradients, [means[f"entry {key!r}"] for key in entries])
        return averages

    def mean(self, value: Tensor, count: Weight | None) -> Tensor:
        """See ``Strategy.mean``."""
        self._loop.gathers("mean")
        # Under a name of its own, since all ranks take part in the backward, or none.
        graph = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
        tensors = {"the value with a gradient": value.detach()} if graph else {"the value": value}
        mean: Tensor = _Mean.apply(value, self._weights("mean", tensors, count), self)
        return mean

    def _weights(self, call: str, tensors: dict[str, Any], weight: Weight | None) -> list[float]:
        """Return the weights of all ranks. Fill in zeros for each tensor that is None on this rank only. Collective.

        Args:
            call: name of the call, for messages.
            tensors: by their names.
            weight: as the script passes it.

        Raises:
            UsageError: tensors differ or can't be averaged, or the weights have no mean; on every rank.
        """
        ranks = self.communicator
        forms = {name: self._form(tensor) for name, tensor in tensors.items()}
        # The upper bits of the digest are exact in float64.
        facts = torch.tensor([derived_seed(forms) >> 11, self._loop.weight(weight)], dtype=torch.float64)
        digests, weights = ranks.all_gather(facts).T.tolist()
        if len(set(digests)) > 1:
            known = {name: form for each in ranks.all_gather_data(forms) for name, form in each.items() if form}
            forms = {name: form or known.get(name, form) for name, form in forms.items()}
            if difference := difference_between_ranks(ranks, forms):
                raise UsageError(f"{call}() needs the same tensors on all ranks, but {' is '.join(difference)}.")
        for name, (kind, *shape) in ((name, form) for name, form in forms.items() if form):
            if kind.startswith("a "):
                raise UsageError(
                    f"{call}() takes dense floating-point tensors without a graph, but {name} is {kind}: pass what its "
                    "float(), to_dense() or detach() returns."
                )
            if tensors[name] is None:
                tensors[name] = torch.zeros(shape, dtype=getattr(torch, kind), device=ranks.device)
        if not sum(weights) or not all(0 <= each < torch.inf for each in weights):
            raise UsageError(
                f"the weights in {call}() are {by_rank(enumerate(weights))}: pass this rank's number of samples, or of "
                "tokens, which may be 0, but not on all ranks. The default is nan if several batches, with different "
                "numbers of samples, were taken from loaders before the call."
            )
        return weights  # type: ignore[no-any-return]

    def _form(self, tensor: Any) -> list[Any]:
        """Return the form of a tensor, as the ranks compare it; empty for None; "a ..." if it can't be averaged."""
        if not isinstance(tensor, Tensor):
            return [] if tensor is None else [f"a {type(tensor).__name__}"]
        kind = str(tensor.dtype).removeprefix("torch.")
        if self.communicator.sharding.is_sharded(tensor):
            kind = "a shard, whose backward has averaged it"
        elif tensor.layout != torch.strided or not tensor.is_floating_point() or tensor.grad_fn is not None:
            kind = f"a {tensor.layout} {kind}, {'with' if tensor.grad_fn is not None else 'without'} a graph"
        return [kind, *tensor.shape]

    def means(self, tensors: dict[str, Any], weights: list[float]) -> dict[str, Any]:
        """Return the weighted means of the ranks' tensors, as new tensors. Collective."""
        present = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}
        device, weight = self.communicator.device, weights[self.communicator.rank]
        # A sum in 16 bits may overflow where the mean does not.
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in present.values()), torch.float32)
        parts = [tensor.reshape(-1).to(device, dtype) for tensor in present.values()]
        flat = torch.cat([torch.zeros(0, dtype=dtype, device=device), *parts])
        # Without samples, there may be NaN.
        flat = self.communicator.all_reduce(flat * (weight / sum(weights)) if weight else torch.zeros_like(flat))
        split = torch.split(flat, [*map(len, parts)])
        for (name, tensor), part in zip(present.items(), split, strict=True):
            present[name] = torch.empty_like(tensor).copy_(part.view(tensor.shape))
        return {**tensors, **present}


class _Mean(torch.autograd.Function):
    """The mean of the ranks' values, each with its weight.

    The ranks' losses that follow from it have a mean, too. ``step`` has put their weights into the gradients that reach
    the backward, whose sum is then the derivative by the mean. Outside of it, the gradients have no weights yet, and
    ``average`` will weigh what the backward returns. So this is the mean of the gradients with the same weights.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, weights: list[float], means: WeightedMeans) -> Tensor:
        ctx.weights, ctx.means = weights, means
        mean: Tensor = means.means({"": value}, weights)[""]
        return mean

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, None, None]:
        ranks, weights = ctx.means.communicator, ctx.weights
        if ranks.collectives.pulse.phase == WAITING:
            return ranks.all_reduce(grad) * (weights[ranks.rank] / sum(weights)), None, None
        return _Mean.apply(grad, weights, ctx.means), None, None
