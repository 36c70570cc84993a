"""What ``strategy.prepare`` does to modules, optimizers and schedulers."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer

from unitrain.errors import CommunicationError, UsageError
from unitrain.rng import seed_rank
from unitrain.training import batch_norm, precision

if TYPE_CHECKING:
    from unitrain.strategy import Strategy


class Preparation:
    """The objects that a strategy has prepared, and how it does so."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._originals: MutableMapping[nn.Module, nn.Module] = {}
        self._names: dict[Parameter, str] = {}
        self._ranks_differ = False

    def prepare(self, objects: Sequence[Any]) -> tuple[Any, ...]:
        """See ``Strategy.prepare``. Modules come first, so that optimizers find their parameters in place."""
        for one in objects:
            if not isinstance(one, (nn.Module, Optimizer)) and not callable(getattr(one, "step", None)):
                raise UsageError(f"prepare() takes modules, optimizers and schedulers, not {type(one).__name__}.")
        done = {i: self._module(one) for i, one in enumerate(objects) if isinstance(one, nn.Module)}
        for one in objects:
            if isinstance(one, Optimizer):
                self._optimizer(one)
        if not self._ranks_differ:
            self._ranks_differ = True
            # From here on ranks draw apart (dropout, say); rank 0 goes on as one process would.
            if self._strategy.rank > 0:
                seed_rank(self._strategy.config.seed, self._strategy.rank)
        return tuple(done.get(i, one) for i, one in enumerate(objects))

    def _module(self, module: nn.Module) -> nn.Module:
        strategy = self._strategy
        if module in self._originals or module in self._originals.values():
            raise UsageError(f"this {type(module).__name__} was prepared before: prepare each module once.")
        if any(p.is_meta for p in module.parameters()):
            raise UsageError(
                "the model has parameters on the meta device: materialise them (to_empty, then initialise)."
            )
        if any(is_lazy(p) for p in module.parameters()):
            raise UsageError("the model has layers that don't know their shapes yet: run one batch through it first.")
        module.to(strategy.device)
        if strategy.config.sync_batchnorm:
            batch_norm.synchronise(self.unwrap(module), strategy)
        strategy.precision.apply(module)
        self._share(module)
        # A compiled module's names have a prefix; messages and checkpoints speak of the user's.
        self._names.update({p: name for name, p in self.unwrap(module).named_parameters()})
        wrapped = strategy._wrap_model(module)
        self._originals[wrapped] = module
        return wrapped

    @torch.no_grad()
    def _share(self, module: nn.Module) -> None:
        """Check that all ranks have the same model, and copy rank 0's parameters and buffers to them."""
        strategy = self._strategy
        if strategy.world_size == 1:
            return
        named = [*module.named_parameters(), *module.named_buffers()]
        shapes = [(name, tuple(t.shape), str(t.dtype)) for name, t in named]
        for rank, theirs in enumerate(strategy.all_gather_object(shapes)):
            _compare(rank, shapes, strategy.rank, theirs)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for _, tensor in named:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for tensors in by_dtype.values():
            flat = strategy.broadcast(torch.cat([t.reshape(-1) for t in tensors]))
            for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def _optimizer(self, optimizer: Optimizer) -> None:
        strategy = self._strategy
        if isinstance(optimizer, LBFGS):
            raise UsageError(
                "LBFGS evaluates its loss several times a step, which strategy.step can't do: call it yourself, in one "
                "process."
            )
        self.check([p for group in optimizer.param_groups for p in group["params"]])
        if optimizer.state or strategy.world_size > 1:
            state = optimizer.state_dict()
            has_state = strategy.broadcast_object(bool(state["state"]))
            if has_state:
                # Also moves state that was loaded or made before the parameters moved to the device.
                optimizer.load_state_dict(strategy.broadcast_object(state))
        strategy._training_step.register(optimizer)

    def check(self, parameters: Sequence[Parameter]) -> None:
        """See ``Strategy.check_prepared``. One process needs no preparation, so nothing is wrong there."""
        if self._strategy.world_size == 1:
            return
        missing = [p for p in parameters if not self.knows(p)]
        if missing:
            shapes = ", ".join(str(tuple(p.shape)) for p in missing[:3])
            raise UsageError(
                f"the optimizer holds {len(missing)} parameters of no prepared module (shapes {shapes}, ...): their "
                "gradients would differ from rank to rank. Give the module to prepare(), before or with the optimizer."
            )

    def knows(self, parameter: Parameter) -> bool:
        """Whether a parameter is one of a prepared module."""
        return parameter in self._names

    def name(self, parameter: Parameter) -> str:
        """Return a parameter's name in its module."""
        return self._names.get(parameter, f"an unprepared parameter of shape {tuple(parameter.shape)}")

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Peel backends' wrappers and ``torch.compile``'s, in whatever order they lie."""
        while True:
            inner = self._originals.get(module, module)
            inner = getattr(inner, "_orig_mod", inner)
            if inner is module:
                return module
            module = inner

    def export(self, module: nn.Module) -> nn.Module:
        """See ``Strategy.export``."""
        plain = copy.deepcopy(self.unwrap(module)).cpu().eval()
        batch_norm.revert(plain)
        precision.remove_hooks(plain)
        return plain

    def modules(self) -> list[nn.Module]:
        """Return what ``prepare`` returned for each module."""
        return list(self._originals)

    def release(self) -> None:
        """Let go of the wrappers, whose reducers must be gone before their process group is."""
        self._originals = WeakKeyDictionary(self._originals)


def _compare(rank: int, ours: list[Any], our_rank: int, theirs: list[Any]) -> None:
    if ours == theirs:
        return
    mine, other = next((a, b) for a, b in zip_longest(ours, theirs, fillvalue=("nothing",)) if a != b)
    raise CommunicationError(
        f"rank {our_rank} and rank {rank} have different models: {' '.join(map(str, mine))} against "
        f"{' '.join(map(str, other))}. Build the same model on every rank."
    )
