"""The prepared modules, and the names of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar, runtime_checkable
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.communication.communicator import Communicator
from unitrain.errors import UsageError

T = TypeVar("T")


@runtime_checkable
class Average(Protocol):
    """A module with other weights for a model, such as averages of them."""

    def swapped(self) -> AbstractContextManager[nn.Module]:
        """Return a context manager that gives the model these weights, and yields the model."""


class PreparedModules:
    """Records the modules that a strategy has prepared, and their parameters.

    Modules are referenced weakly, so that they are freed when the script drops them. Of a module that is gone, the
    layers that the script still has count as prepared modules.

    Args:
        shares: each rank's share of the samples, in lowest terms.

    Attributes:
        count: number of modules that were prepared, the same on all ranks; within a trial, in the trial.
        layers: of all modules, each after the module that it is in.
    """

    def __init__(self, shares: tuple[int, ...]) -> None:
        self.count: int = 0
        # The original by the module that prepare has returned.
        self._originals: WeakKeyDictionary[nn.Module, ref[nn.Module]] = WeakKeyDictionary()
        self.layers: list[ref[nn.Module]] = []
        self._names: dict[Parameter, str] = {}
        self.shares: tuple[int, ...] = shares  # how the samples are shared among the processes
        self._replaced: dict[Parameter, Parameter] = {}  # the new parameter by the old one
        # By module, a function that exchanges the weights of training and others; called twice, it changes nothing.
        self._swapped: dict[nn.Module, Callable[[], None]] = {}

    def update(self, optimizer: Optimizer) -> None:
        """Give an optimizer the parameters that have replaced its own, in place. Its state stays."""
        for group in optimizer.param_groups:
            # In the same list, which LBFGS refers to.
            group["params"][:] = [self._replaced.get(p, p) for p in group["params"]]
        for old, new in self._replaced.items():
            if old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)

    def add(self, wrapped: nn.Module, module: nn.Module, old: Mapping[str, Parameter] | None = None) -> None:
        """Record a module, and the names of its parameters.

        Args:
            wrapped: what ``prepare`` returns for ``module``: a wrapper, or ``module`` itself.
            module: the module.
            old: the parameters that it had before, by name, if some were replaced.
        """
        self.count += 1
        self._originals[wrapped] = ref(module)
        self.layers += map(ref, wrapped.modules())
        # Without the prefix of a compiled module: messages and checkpoints use the names of the original.
        for name, parameter in self.unwrap(module).named_parameters():
            self._names[parameter] = name
            if old is not None and old[name] is not parameter:
                self._replaced[old[name]] = parameter

    def __contains__(self, module: nn.Module) -> bool:
        return any(module is known or module is original() for known, original in list(self._originals.items()))

    def __iter__(self) -> Iterator[nn.Module]:
        """Yield each module in the form that ``prepare`` has returned, in the order of preparation."""
        return iter(_outermost(layer() for layer in self.layers))

    def on_all_ranks(self, communicator: Communicator) -> list[nn.Module]:
        """Return the modules that no rank has freed, and forget the others. Collective."""
        layers = present(communicator, self.layers)
        self.layers = [known for known, layer in zip(self.layers, layers, strict=True) if layer is not None]
        return _outermost(layers)

    def keep(self, parameters: Collection[Parameter]) -> None:
        """Forget all other parameters: the script has dropped their modules."""
        self._names = {p: name for p, name in self._names.items() if p in parameters}
        self._replaced = {old: new for old, new in self._replaced.items() if new in parameters}

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Return the original module, without wrappers of the backend and ``torch.compile``, in any order."""
        while True:
            original = self._originals.get(module, lambda: None)()
            inner = module if original is None else original
            inner = getattr(inner, "_orig_mod", inner)
            if inner is module:
                return module
            module = inner

    @contextmanager
    def swapped(self, module: nn.Module, exchange: Callable[[], None]) -> Iterator[None]:
        """Record within a block that a module has other weights than in training.

        Args:
            module: the module.
            exchange: exchanges the weights and those of training. It is not called here.
        """
        self._swapped[module] = exchange
        try:
            yield
        finally:
            del self._swapped[module]

    @property
    def swapped_modules(self) -> Collection[nn.Module]:
        """The modules that have other weights than in training."""
        return self._swapped.keys()

    @contextmanager
    def training_weights(self) -> Iterator[None]:
        """Give all modules the weights of training within a block."""
        # None is swapped meanwhile, so that blocks of this kind may be nested.
        swapped, self._swapped = self._swapped, {}
        for exchange in swapped.values():
            exchange()
        try:
            yield
        finally:
            for exchange in swapped.values():
                exchange()
            self._swapped = swapped

    def has(self, parameter: Parameter) -> bool:
        """Return whether a parameter belongs to a prepared module."""
        return parameter in self._names or parameter in self._replaced

    def name(self, parameter: Parameter) -> str:
        """Return a parameter's name in its module."""
        return self._names.get(parameter, f"an unprepared parameter of shape {tuple(parameter.shape)}")

    def check(self, parameters: Iterable[Parameter]) -> None:
        """Check that parameters of an optimizer belong to prepared modules.

        Raises:
            UsageError: one belongs to none, or was replaced; the message has its shape or name.
        """
        missing = [p for p in parameters if p not in self._names]
        replaced = [self._names[self._replaced[p]] for p in missing if p in self._replaced]
        if replaced:
            raise UsageError(
                f"the optimizer has {len(replaced)} parameters ({', '.join(replaced[:3])}, ...) that prepare() has "
                "replaced, so it would change nothing: pass the optimizer to prepare(), with or after the model."
            )
        if missing:
            shapes = ", ".join(str(tuple(p.shape)) for p in missing[:3])
            raise UsageError(
                f"{len(missing)} parameters of the optimizer belong to no prepared module (shapes {shapes}, ...), so "
                "each rank would train its own copy of them. Pass the module to prepare(), before or with the "
                "optimizer. Modules of a trial are forgotten at its end: make a new one, and load the state dict."
            )

    def check_modules(self) -> None:
        """Raise UsageError if the modules have parameters that they did not have when they were prepared.

        The values of these differ between the ranks, and their gradients would not be averaged.
        """
        for module in map(self.unwrap, self):
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and not self.has(parameter):
                    raise UsageError(
                        f"{name} of a prepared {type(module).__name__} is another parameter than when it "
                        "was prepared, and would be trained on each rank alone, or not at all: change the model before "
                        "prepare(), load values into its parameters (without assign=True), or prepare what is added."
                    )


def present(communicator: Communicator, references: Sequence[ref[T]]) -> list[T | None]:
    """Return the objects that exist on every rank, and None in the place of others. Collective.

    Each rank collects its garbage at other times, so only this tells all of them the same.
    """
    objects = [reference() for reference in references]
    if communicator.world_size > 1 and objects:
        everywhere = communicator.all_reduce(torch.tensor([known is not None for known in objects]), "min").tolist()
        return [known if exists else None for known, exists in zip(objects, everywhere, strict=True)]
    return objects


def _outermost(layers: Iterable[nn.Module | None]) -> list[nn.Module]:
    """Return the layers that are in no layer before them. None stands for one that is gone."""
    outermost: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for layer in layers:
        if layer is not None and layer not in inside:
            outermost.append(layer)
            inside.update(layer.modules())
    return outermost
