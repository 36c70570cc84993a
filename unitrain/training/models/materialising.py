"""Gives memory and values to the tensors of a model that was built without: deferred, or on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from unitrain.communication.communicator import Communicator
from unitrain.communication.streaming import broadcast_tensors
from unitrain.errors import UsageError
from unitrain.process import return_memory
from unitrain.training.models.deferred import is_deferred, materialise


class Origins:
    """What rank 0 has the values of a model's tensors from, if a rank has no memory for some of them.

    Args:
        communicator: the communicator of this process.
        module: the model. It gets memory without values on ``device``; but if ranks have parts of parameters, those
            are put on the meta device.
        device: of this process.

    Raises:
        UsageError: a buffer has no value and is in no checkpoint; on every rank.
    """

    def __init__(self, communicator: Communicator, module: nn.Module, device: torch.device) -> None:
        self._communicator = communicator
        self._values: dict[str, Callable[[], Tensor]] = {}
        saved = module.state_dict(keep_vars=True).keys()
        unknown = [name for name, tensor in _named(module) if tensor.is_meta]
        self.unknown: Sequence[str] = communicator.broadcast_data(unknown)
        names = {name for name, _ in module.named_parameters()} | saved
        lost = [name for name in self.unknown if name not in names]
        if lost:
            raise UsageError(
                f"the model was built on the meta device, and {len(lost)} buffers that no checkpoint contains "
                f"({', '.join(lost[:3])}, ...) have no values: build it within `with strategy.deferred():` instead."
            )
        for name, parameter in module.named_parameters():
            emptied = "meta" if communicator.shards_parameters else device
            has_none = parameter.is_meta or is_deferred(parameter)
            self._add(name, give_memory(parameter, emptied) if has_none else parameter.detach())
        for prefix, layer in module.named_modules():
            for name, buffer in layer._buffers.items():
                if buffer is None:
                    continue
                self._add(f"{prefix}.{name}".lstrip("."), buffer)
                if buffer.is_meta or is_deferred(buffer):
                    layer._buffers[name] = _empty_like(buffer, device)

    @classmethod
    def of(cls, communicator: Communicator, module: nn.Module, device: torch.device) -> Origins | None:
        """Return the origins of a model's values, or None if all ranks have memory with values. Collective."""
        own = any(tensor.is_meta or is_deferred(tensor) for _, tensor in _named(module))
        return cls(communicator, module, device) if any(communicator.all_gather_data(own)) else None

    def _add(self, name: str, tensor: Tensor) -> None:
        self._values[name] = partial(materialise, tensor) if is_deferred(tensor) else lambda: tensor

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Give rank 0's values to the tensors of a model on all ranks, one after the other. Collective.

        A tensor without a value becomes NaN.
        """
        tensors = dict(_named(module))
        for name in self.unknown:
            part = self._communicator.to_local(tensors.pop(name))
            part.fill_(torch.nan if part.is_floating_point() or part.is_complex() else 0)
        sources = (self._values.pop(name)() for name in tensors)
        broadcast_tensors(self._communicator, list(tensors.values()), sources)
        return_memory()


class WithoutWeights:
    """Refuses calls of a model some of whose weights have no values, until they are loaded.

    Args:
        module: the model.
        names: of the weights.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._hooks = [
            module.register_forward_pre_hook(self._refuse, prepend=True),
            module.register_load_state_dict_post_hook(self._after_load),  # type: ignore[no-untyped-call]
        ]

    def _refuse(self, module: nn.Module, args: Any) -> None:
        some = ", ".join(sorted(self._names)[:3])
        raise UsageError(
            f"the model was built on the meta device, and {len(self._names)} of its weights ({some}, ...) have no "
            "values: load them before the model is called (strategy.load_weights, or resume a checkpoint), or build "
            "it within `with strategy.deferred():` instead, which initialises them."
        )

    def _after_load(self, module: nn.Module, keys: Any) -> None:
        if self._names.isdisjoint(keys.missing_keys):
            self.end()

    def end(self) -> None:
        """Let the model be called."""
        for hook in self._hooks:
            hook.remove()


def give_memory(parameter: Parameter, device: torch.device | str) -> Tensor:
    """Give a parameter memory without values, and return a tensor that is what it was. It stays the same object."""
    kind = Parameter if is_deferred(parameter) else type(parameter)
    new: Any = Tensor._make_subclass(kind, _empty_like(parameter, device), parameter.requires_grad)
    vars(new).update({key: value for key, value in vars(parameter).items() if key not in ("recorder", "_is_param")})
    for hook in (parameter._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        new.register_post_accumulate_grad_hook(hook)
    # As torch.utils.swap_tensors, which refuses a parameter with weak references: of a layer such as LSTM to its own.
    for name in ("__class__", "__dict__"):
        before = getattr(parameter, name)
        setattr(parameter, name, getattr(new, name))
        setattr(new, name, before)
    torch._C._swap_tensor_impl(parameter, new)
    old: Tensor = new.detach()
    return old


def _empty_like(tensor: Tensor, device: torch.device | str) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]
