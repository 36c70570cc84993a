"""Gives memory and values to the tensors of a model that was built on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unitrain.communication.communicator import Communicator
from unitrain.communication.state_transfer import broadcast_tensors, copy_own
from unitrain.errors import UsageError
from unitrain.module_copy import in_place_of, without_memory
from unitrain.rng import derived_seed, generators_restored, seed_generators

Initialise = Callable[[nn.Module], object] | bool
"""Initialises tensors on the meta device: a function that is called with each module after ``reset_parameters``; True:
``reset_parameters`` alone; False: nothing, as they are loaded."""
_RESETS = ("reset_parameters", "_reset_parameters")  # the second one belongs to torch's attention and Transformer
_REMEDY = (
    "Give the module a reset_parameters() that sets it, or pass prepare(..., initialise=function), which is called "
    "with each module (Hugging Face: model._init_weights), or leave initialise out to load the weights afterwards."
)


class Values:
    """Where the values of a model's tensors come from, if rank 0 or another rank has some of them on the meta device.

    A tensor that rank 0 has in memory is sent to the other ranks. The others are initialised by each rank with the
    same seed, or are NaN until they are loaded.

    Args:
        communicator: of this process. Making an object is collective.
        module: the original module, whose tensors have no memory yet.
        initialise: as ``strategy.prepare`` takes it.
        seed: of the initial values, the same on all ranks.

    Attributes:
        unknown: names of the tensors that have no values until they are loaded.

    Raises:
        UsageError: a tensor would never have a value; on every rank.
    """

    def __init__(self, communicator: Communicator, module: nn.Module, initialise: Initialise, seed: int) -> None:
        self._communicator = communicator
        on_meta = [name for name, tensor in _named(module) if tensor.is_meta]
        without_value: Sequence[str]
        without_value, initialises = communicator.broadcast_data((on_meta, bool(initialise)))
        self._drawn: Sequence[str] = without_value if initialises else ()
        self.unknown: Sequence[str] = () if initialises else without_value
        lost = set(self.unknown) - {name for name, _ in module.named_parameters()} - module.state_dict().keys()
        if lost:
            raise UsageError(
                f"the model was built on the meta device, and {len(lost)} buffers that no checkpoint contains "
                f"({', '.join(sorted(lost)[:3])}, ...) have no values: pass prepare(..., initialise=function) with a "
                "function that sets them, or let the constructor make them with device='cpu'."
            )
        # Other ranks need not hold on to what they have.
        sent = {name: t.detach() for name, t in _named(module) if name not in without_value}
        self._sent = sent if communicator.is_main else dict.fromkeys(sent, torch.empty(0))
        function = initialise if callable(initialise) else None
        self._initialiser = _Initialiser(module, function, seed) if initialises else None

    @classmethod
    def of(cls, communicator: Communicator, module: nn.Module, initialise: Initialise, seed: int) -> Values | None:
        """Return the source of values, or None if all ranks have all tensors in memory. Collective."""
        has_meta = any(tensor.is_meta for _, tensor in _named(module))
        needed = any(communicator.all_gather_data(has_meta))
        return cls(communicator, module, initialise, seed) if needed else None

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Give the tensors of a model in memory their values, one module after the other. Collective.

        Args:
            module: the module, with memory on this rank's device, perhaps sharded.

        Raises:
            UsageError: nothing initialises a tensor, or initialising it fails.
        """
        tensors = dict(_named(module))  # found anew: the backend has replaced parameters by shards
        # Rather NaN than what the memory held: a weight that is never loaded then shows up in the first loss.
        for name in self.unknown:
            _fill_with_nan(self._communicator.sharding.to_local(tensors[name]))
        if self._initialiser is not None:
            for name, value in self._initialiser.values(self._drawn):
                copy_own(self._communicator, tensors[name], value)
        broadcast_tensors(self._communicator, [tensors[name] for name in self._sent], self._sent.values())


class _Initialiser:
    """Draws the values of a model's parameters, a module at a time: the same for any number of ranks and any backend.

    So a model needs the memory of one module on the host, and of this rank's part of it on the device.

    A module's own parameters are in memory while it and the modules that contain it are initialised, in this order; all
    others are on the meta device, where nothing is drawn. ``function`` is called after each ``reset_parameters``.
    """

    def __init__(self, module: nn.Module, function: Callable[[nn.Module], object] | None, seed: int) -> None:
        self._skeleton = without_memory(module, module.parameters())
        self._function = function
        self._seed = seed

    def values(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and buffers with their values, on the CPU. Raise UsageError if nothing initialises one."""
        for path, layer in list(self._skeleton.named_modules()):
            prefix = f"{path}." if path else ""
            empty = {key: tensor for key, tensor in _named(layer, recurse=False) if prefix + key in names}
            # NaN, or for ints the version, shows afterwards which tensors nothing has written.
            versions = {}
            for key, tensor in empty.items():
                setattr(layer, key, _in_memory(tensor, "cpu"))
                value = _fill_with_nan(getattr(layer, key).detach())
                if not _has_nan(value):
                    versions[key] = value._version
            if empty:
                self._initialise_outwards(path)
            for key in empty:
                value = getattr(layer, key).detach()
                if value.isnan().any() or value._version == versions.get(key):
                    raise UsageError(f"prepare() can't initialise {prefix}{key} of a {type(layer).__name__}. {_REMEDY}")
                yield prefix + key, value
            for key, tensor in empty.items():
                setattr(layer, key, tensor)  # frees the memory of the values

    def _initialise_outwards(self, path: str) -> None:
        """Initialise a layer: as constructors run, an outer module may overwrite the values of its layers.

        Args:
            path: name of the layer in the model; "" for the model itself.
        """
        parts = path.split(".") if path else []
        with generators_restored():
            for length in range(len(parts), -1, -1):
                around = ".".join(parts[:length])
                seed_generators(derived_seed(self._seed, path, around))
                module = self._skeleton.get_submodule(around)
                # Only the first that the module has: the other one would draw the same values again.
                for name in [name for name in _RESETS if hasattr(module, name)][:1]:
                    getattr(module, name)()
                if self._function is not None:
                    self._function(module)


def give_memory(module: nn.Module, device: torch.device, only: Collection[Tensor] | None = None) -> None:
    """Replace tensors of a module on the meta device by tensors in memory, without values. Tied ones stay tied.

    Args:
        module: the module, changed in place.
        device: where the memory is.
        only: the tensors to replace; None for all.
    """
    made: dict[Tensor, Tensor] = {}
    for layer in module.modules():
        for name, tensor in list(_named(layer, recurse=False, remove_duplicate=False)):
            if tensor.is_meta and (only is None or tensor in only):
                if tensor not in made:
                    made[tensor] = _in_memory(tensor, device)
                setattr(layer, name, made[tensor])


def _has_nan(tensor: Tensor) -> bool:
    """Return whether there is NaN in a tensor's dtype."""
    return tensor.is_floating_point() or tensor.is_complex()


def _fill_with_nan(tensor: Tensor) -> Tensor:
    """Fill a tensor with NaN, or with 0 if its dtype has none."""
    return tensor.fill_(torch.nan if _has_nan(tensor) else 0)


def _in_memory(tensor: Tensor, device: torch.device | str) -> Tensor:
    return in_place_of(tensor, torch.empty_like(tensor.detach(), device=device))


def _named(module: nn.Module, **options: Any) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(**options), *module.named_buffers(**options)]
