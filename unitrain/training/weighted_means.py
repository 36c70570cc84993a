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
    """

    def __init__(self, communicator: Communicator, loop: TrainingLoop) -> None:
        self._communicator, self._loop = communicator, loop

    def average(self, gradients: T, weight: Weight | None) -> T:
        """See ``Strategy.average``."""
        if not isinstance(gradients, (list, tuple, Mapping)):
            raise UsageError(f"average() takes a list, tuple or dict of tensors, not {type(gradients).__name__}.")
        entries = gradients if isinstance(gradients, Mapping) else dict(enumerate(gradients))
        # Sorted, since a dict may have another order on another rank.
        tensors = {f"entry {key!r}": entries[key] for key in sorted(entries, key=repr)}
        means = self._means(tensors, self._weights("average", tensors, weight))
        averages: T = refilled(gradients, [means[f"entry {key!r}"] for key in entries])
        return averages

    def _weights(self, call: str, tensors: dict[str, Any], weight: Weight | None) -> list[float]:
        """Return the weights of all ranks. Fill in zeros for each tensor that is None on this rank only. Collective.

        Args:
            call: name of the call, for messages.
            tensors: by their names.
            weight: as the script passes it.

        Raises:
            UsageError: tensors differ or can't be averaged, or the weights have no mean; on every rank.
        """
        ranks = self._communicator
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
        if self._communicator.sharding.is_sharded(tensor):
            kind = "a shard, whose backward has averaged it"
        elif tensor.layout != torch.strided or not tensor.is_floating_point() or tensor.grad_fn is not None:
            kind = f"a {tensor.layout} {kind}, {'with' if tensor.grad_fn is not None else 'without'} a graph"
        return [kind, *tensor.shape]

    def _means(self, tensors: dict[str, Any], weights: list[float]) -> dict[str, Any]:
        """Return the weighted means of the ranks' tensors, as new tensors. Collective."""
        present = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}
        device, weight = self._communicator.device, weights[self._communicator.rank]
        # A sum in 16 bits may overflow where the mean does not.
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in present.values()), torch.float32)
        parts = [tensor.reshape(-1).to(device, dtype) for tensor in present.values()]
        flat = torch.cat([torch.zeros(0, dtype=dtype, device=device), *parts])
        # Without samples, there may be NaN.
        flat = self._communicator.all_reduce(flat * (weight / sum(weights)) if weight else torch.zeros_like(flat))
        for (name, tensor), part in zip(present.items(), flat.split([*map(len, parts)]), strict=True):
            present[name] = torch.empty_like(tensor).copy_(part.view(tensor.shape))
        return {**tensors, **present}
