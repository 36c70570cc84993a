"""``EMA``: an exponential moving average of a model's weights, with which the model can be evaluated and exported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from unitrain.device import by_device
from unitrain.errors import UsageError
from unitrain.training.feature import Feature
from unitrain.training.loop.sockets import Sockets
from unitrain.training.models.batch_norm import has_statistics, is_unsynchronised

_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class EMA(nn.Module, Feature):
    """Exponential moving average of a prepared model's weights, updated after each step of an optimizer of this model.

    Pass it to ``strategy.evaluation`` to evaluate the model with the averaged weights, to ``strategy.checkpoint`` to
    save and resume it, and to ``strategy.export`` for the averaged model.

    It begins with the weights before training (those that the script has loaded until the first step), and after each
    step becomes ``decay * average + (1 - decay) * weights``. Parameters and the running statistics of BatchNorm are
    averaged. Other buffers are the model's own.

    It is a module so that checkpoints treat it as they do the model. Its state dict has the keys of the model's.

    Args:
        model: the model, as ``prepare`` returned it.
        decay: share of the average that a step keeps; the rest comes from the new weights.

    Raises:
        UsageError: ``decay`` is not in [0, 1); or, when it is added, the model was not prepared, its weights can't be
            averaged, or the ranks have different weights after a step.

    Attributes:
        averages: the averages of all weights, or of this rank's parts of them.

    Example:
        >>> ema = strategy.add(EMA(model, decay=0.999))
        >>> with strategy.evaluation(ema):
        ...     logits = model(images)
    """

    kept_in_checkpoints = "an EMA"

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        super().__init__()
        if not 0 <= decay < 1:
            raise UsageError(f"ema: decay is {decay}, but must be at least 0 and less than 1, like 0.999.")
        self._models = model, model  # in a tuple: they are no part of this module
        # torch's own function for AveragedModel, which would average a copy of the model: none can be made of shards.
        self._update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    def plug_in(self, sockets: Sockets) -> None:
        """Average the weights from now on."""
        if differ := sockets.replicas.differ:
            raise UsageError(f"an EMA averages weights after each step, and {differ}.")
        prepared, to_local, model = sockets.prepared, sockets.communicator.sharding.to_local, self._models[0]
        original = prepared.unwrap(model)
        self._models = model, original
        self._prepared = prepared
        self._named = _averaged(original)
        saved = {id(value) for value in original.state_dict(keep_vars=True).values()}
        for name, weight in self._named.items():
            if id(weight) not in saved:
                raise UsageError(f"ema: the model's state_dict() lacks {name}, so its average could not be saved.")
            if isinstance(weight, Parameter) and not prepared.has(weight):
                raise UsageError(
                    f"an EMA needs a prepared model, but {name} belongs to none: pass it what prepare() returned."
                )
            if weight.dtype not in _DTYPES:
                raise UsageError(
                    f"ema: {name} is {str(weight.dtype).removeprefix('torch.')}, which is too coarse for an average: "
                    "keep the weights in float32, and set precision to bf16 or fp16 for the forward."
                )
        averages = [weight.detach().clone() for weight in self._named.values()]
        self._average_of = {id(weight): average for weight, average in zip(self._named.values(), averages, strict=True)}
        self._weights = [to_local(weight) for weight in self._named.values()]
        self.averages: list[Tensor] = [to_local(average) for average in averages]
        self._alike = list(zip(by_device(self.averages), by_device(self._weights), strict=True))
        # Layers without a forward hold the statistics that differ between ranks: they are averaged as a model's are.
        self._statistics = nn.ModuleList(
            _holder(layer, self._average_of) for layer in original.modules() if is_unsynchronised(layer)
        )
        self._parameters_of_model = {weight for weight in self._named.values() if isinstance(weight, Parameter)}
        self._begun = False
        self._versions: list[int] = []  # of the weights, when they were exchanged last
        super().plug_in(sockets)

    def before_update(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> None:
        """Copy the weights before the first step, if the script has loaded others since the average was made."""
        if not self._averages_any(parameters):
            return
        if self._is_swapped:
            raise UsageError(
                "a step was made within ema.swapped(), where it would train the averaged weights: leave it first."
            )
        if not self._begun:
            self._begin()
            self._begun = True

    def after_update(self, optimizer: Optimizer, parameters: Sequence[Parameter], stepped: bool) -> None:
        """Update the average."""
        if stepped and self._averages_any(parameters):
            for averages, weights in self._alike:
                self._update(averages, weights, 0)  # which ignores the number of steps

    def _averages_any(self, parameters: Sequence[Parameter]) -> bool:
        return any(parameter in self._parameters_of_model for parameter in parameters)  # as a rule, the first is

    @torch.no_grad()
    def _begin(self) -> None:
        """Copy the weights, if the script has loaded others before the first step. Not within a swap."""
        if self._begun:
            return
        # Values and not versions: to write to ``parameter.data`` does not change the version.
        triples = zip(self._named.values(), self._weights, self.averages, strict=True)
        if all(torch.equal(weight, average) for named, weight, average in triples if isinstance(named, Parameter)):
            return
        for averages, weights in self._alike:
            torch._foreach_copy_(averages, weights)

    @contextmanager
    def swapped(self) -> Iterator[nn.Module]:
        """Context manager that gives the model the averaged weights. It yields the model. Not collective.

        Checkpoints that are saved or resumed within still have the weights of training.

        Raises:
            UsageError: the model has the averaged weights already, or its weights were changed within.
        """
        if self._is_swapped:
            raise UsageError("swapped() was called within swapped(): the model has averaged weights already.")
        model, original = self._models
        self._begin()
        self._exchange()
        try:
            with self._prepared.swapped(original, self._exchange):
                yield model
                changed = self._changed
        finally:
            self._exchange()
        if changed:
            raise UsageError(
                f"the averaged weights ({changed}) were changed within ema.swapped(): train and load weights outside."
            )

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange the contents of the weights and of their averages. Wrappers and compiled code keep their tensors."""
        self._check_model()
        for weight, average in zip(self._weights, self.averages, strict=True):
            held = weight.clone()  # one tensor at a time, not the model twice
            weight.copy_(average)
            average.copy_(held)
        self._versions = [weight._version for weight in self._named.values()]

    @property
    def _is_swapped(self) -> bool:
        return self._models[1] in self._prepared.swapped_modules

    @property
    def _changed(self) -> str:
        """Name of a parameter that was changed since the weights were exchanged."""
        for (name, weight), version in zip(self._named.items(), self._versions, strict=True):
            if isinstance(weight, Parameter) and weight._version != version:
                return name
        return ""

    def _check_model(self) -> None:
        """Check that the model's weights are the tensors that are averaged."""
        now = _averaged(self._models[1])
        for name in {**self._named, **now}:
            if now.get(name) is not self._named.get(name):
                raise UsageError(
                    f"{name} is not the tensor that the EMA averages: change the model before, or load values into it."
                )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's state dict with the averages in place of the weights."""
        self._check_readable()
        self._begin()
        state: dict[str, Any] = self._models[1].state_dict(keep_vars=True)
        for key, value in state.items():
            value = self._average_of.get(id(value), value)
            state[key] = value.detach() if isinstance(value, Tensor) else value
        return state

    @torch.no_grad()
    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Load the averages from a state dict of an EMA, or of a model. Other values in it are ignored."""
        self._check_readable()
        of_model: dict[str, Any] = self._models[1].state_dict(keep_vars=True)
        averages = {
            key: self._average_of[id(value)] for key, value in of_model.items() if id(value) in self._average_of
        }
        for key, average in averages.items():
            if key not in state_dict or state_dict[key].shape != average.shape:
                raise UsageError(f"ema: the state dict has no {key} of shape {tuple(average.shape)}.")
        for key, average in averages.items():
            average.copy_(state_dict[key])
        self._begun = True

    def _check_readable(self) -> None:
        self._check_model()
        if self._is_swapped:
            raise UsageError("within ema.swapped(), the model has the averaged weights: save or load the model's.")


def _averaged(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that are averaged, by name: floating-point parameters, and running statistics."""
    named: dict[str, Tensor] = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point() or parameter.is_complex()
    }
    for path, layer in module.named_modules():
        if has_statistics(layer) and layer.running_mean is not None and layer.running_var is not None:
            prefix = f"{path}." if path else ""
            named[f"{prefix}running_mean"] = layer.running_mean
            named[f"{prefix}running_var"] = layer.running_var
    return named


def _holder(layer: nn.Module, average_of: Mapping[int, Tensor]) -> nn.Module:
    """Return a BatchNorm with the averages of a layer's statistics."""
    holder = nn.BatchNorm1d(0, affine=False)
    holder.running_mean = average_of.get(id(layer.running_mean))
    holder.running_var = average_of.get(id(layer.running_var))
    return holder
