"""Puts everything back that training steps change: weights, buffers, gradients, optimizer state, random numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unitrain import rng


class _Value:
    """A tensor, and a copy of its value on the host, where GPUs need no memory for it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._version = tensor._version
        self._copy = tensor.detach().to("cpu", copy=True)

    def restore(self) -> Tensor:
        """Return the tensor with its value. One that has not changed is not written to: its version tells others so."""
        # BatchNorm's kernels change running statistics without changing their version.
        if self.tensor._version != self._version or not torch.equal(self.tensor.cpu(), self._copy):
            self.tensor.detach().copy_(self._copy)
            self._version = self.tensor._version
        return self.tensor


class TrainingState:
    """The state of modules, optimizers and random number generators at the time when this is made.

    Args:
        modules: the modules.
        optimizers: the optimizers; their parameters may belong to other modules.
    """

    def __init__(self, modules: Iterable[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = [_OptimizerState(optimizer) for optimizer in optimizers]
        layers = {layer: None for module in modules for layer in module.modules()}
        values: dict[int, _Value] = {}
        # A layer may assign another tensor to the name of a buffer.
        self._slots = [
            (tensors, name, values.setdefault(id(tensor), _Value(tensor)))
            for layer in layers
            for tensors in (layer._parameters, layer._buffers)
            for name, tensor in tensors.items()
            if tensor is not None
        ]
        of_optimizers = [p for one in optimizers for group in one.param_groups for p in group["params"]]
        self._others = [_Value(p) for p in {id(p): p for p in of_optimizers if id(p) not in values}.values()]
        parameters = [value.tensor for value in values.values()] + [value.tensor for value in self._others]
        self._gradients = [(p, p.grad) for p in parameters if p.is_leaf]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context manager that begins without gradients, and at whose end everything is as it was."""
        generators = rng.capture()
        for parameter, _ in self._gradients:
            parameter.grad = None
        try:
            yield
        finally:
            self._restore()
            rng.restore(generators)

    @torch.no_grad()
    def _restore(self) -> None:
        for tensors, name, value in self._slots:
            tensors[name] = value.restore()  # type: ignore[assignment]  # a parameter, if it was one
        for value in self._others:
            value.restore()
        for optimizer in self._optimizers:
            optimizer.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


class _OptimizerState:
    """What an optimizer has: the state of each parameter, the options of its groups, and its own attributes."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._attributes = dict(vars(optimizer))
        self._groups = [_saved({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]
        self._states = {parameter: _saved(state) for parameter, state in optimizer.state.items()}

    def restore(self) -> None:
        optimizer = self._optimizer
        vars(optimizer).clear()
        vars(optimizer).update(self._attributes)
        for group, saved in zip(optimizer.param_groups, self._groups, strict=True):
            _restore(group, saved, keep=("params",))
        for parameter in optimizer.state.keys() - self._states.keys():
            del optimizer.state[parameter]
        for parameter, saved in self._states.items():
            _restore(optimizer.state[parameter], saved)


def _saved(values: dict[str, Any]) -> dict[str, Any]:
    return {k: _Value(v) if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in values.items()}


def _restore(values: dict[str, Any], saved: dict[str, Any], keep: Sequence[str] = ()) -> None:
    for name in values.keys() - saved.keys() - set(keep):
        del values[name]
    for name, value in saved.items():
        values[name] = value.restore() if isinstance(value, _Value) else copy.deepcopy(value)
