"""What has been prepared: the modules behind their wrappers, and the names of their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn import Parameter

from unitrain.errors import UsageError


class PreparedModules:
    """The modules that a strategy has prepared, and their parameters.

    Args:
        distributed: whether there are several processes, whose gradients are averaged.
    """

    def __init__(self, *, distributed: bool) -> None:
        self._distributed = distributed
        self._originals: MutableMapping[nn.Module, nn.Module] = {}
        self._names: dict[Parameter, str] = {}

    def add_names(self, module: nn.Module) -> None:
        """Take note of a module's parameters, by the names that the user knows."""
        # A compiled module's names have a prefix; messages and checkpoints use the user's.
        self._names.update({p: name for name, p in self.unwrap(module).named_parameters()})

    def add(self, wrapped: nn.Module, module: nn.Module) -> None:
        """Take note of what stands for a module from now on: the module itself, or the backend's wrapper."""
        self._originals[wrapped] = module

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._originals or module in self._originals.values()

    def __iter__(self) -> Iterator[nn.Module]:
        """Yield what ``prepare`` returned for each module."""
        return iter(list(self._originals))

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Peel backends' wrappers and ``torch.compile``'s, in whatever order they lie."""
        while True:
            inner = self._originals.get(module, module)
            inner = getattr(inner, "_orig_mod", inner)
            if inner is module:
                return module
            module = inner

    def knows(self, parameter: Parameter) -> bool:
        """Return whether a parameter is one of a prepared module."""
        return parameter in self._names

    def name(self, parameter: Parameter) -> str:
        """Return a parameter's name in its module."""
        return self._names.get(parameter, f"an unprepared parameter of shape {tuple(parameter.shape)}")

    def check(self, parameters: Iterable[Parameter]) -> None:
        """Raise UsageError where an optimizer holds parameters of a module that was never prepared.

        One process needs no preparation, so nothing is wrong there.
        """
        if not self._distributed:
            return
        missing = [p for p in parameters if not self.knows(p)]
        if missing:
            shapes = ", ".join(str(tuple(p.shape)) for p in missing[:3])
            raise UsageError(
                f"the optimizer holds {len(missing)} parameters of no prepared module (shapes {shapes}, ...): their "
                "gradients would differ from rank to rank. Give the module to prepare(), before or with the optimizer."
            )

    def release(self) -> None:
        """Let go of the wrappers, whose reducers must be gone before their process group is."""
        self._originals = WeakKeyDictionary(self._originals)
