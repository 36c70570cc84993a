"""Puts everything back that trial steps change: weights, buffers, gradients, optimizer state, random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from unitrain import rng


class TrainingState:
    """The state of modules, optimizers and random number generators at the time when this is made.

    Unlike state dicts, it includes buffers that are not persistent and attributes of optimizers. The same tensors are
    filled again, from copies on the host.
    """

    def __init__(self, modules: Iterable[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        layers = {layer: None for module in modules for layer in module.modules()}
        # The attributes of a layer, and its parameters and buffers, which are dicts among them.
        of_layers = [own for layer in layers for own in (vars(layer), *vars(layer).values()) if isinstance(own, dict)]
        states = [state for one in optimizers for state in (*one.param_groups, *one.state.values())]
        self._contents = [(own, _copied(own)) for own in states]
        attributes = [*of_layers, *(own for one in optimizers for own in (vars(one), one.state))]
        self._attributes = [(own, dict(own)) for own in attributes]
        found = tree_leaves([content for _, content in (*self._contents, *self._attributes)])
        values = {id(value): value for value in found if isinstance(value, Tensor)}
        self._values = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in values.values()]
        self._gradients = [(tensor, tensor.grad) for tensor, _ in self._values if tensor.is_leaf]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context manager that begins without gradients, and puts everything back at its end."""
        generators = rng.capture()
        for tensor, _ in self._gradients:
            tensor.grad = None
        try:
            yield
        finally:
            self._restore()
            rng.restore(generators)

    @torch.no_grad()
    def _restore(self) -> None:
        for own, content in (*self._attributes, *((own, _copied(content)) for own, content in self._contents)):
            own.clear()
            own.update(content)
        for tensor, value in self._values:
            # One that has not changed is not written to: buffers with a new version are broadcast.
            if not torch.equal(tensor.cpu(), value):
                tensor.copy_(value)
        for tensor, gradient in self._gradients:
            tensor.grad = gradient


def _copied(content: dict[Any, Any]) -> dict[Any, Any]:
    """Return a copy of a dict, and of the dicts and lists in it, with the same tensors."""
    return {key: tree_map(lambda leaf: leaf, value) for key, value in content.items()}
