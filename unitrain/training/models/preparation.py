"""``strategy.prepare``: prepares modules, optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from unitrain.communication.backend import Backend
from unitrain.communication.communicator import Communicator
from unitrain.communication.sharding import OwnedBy
from unitrain.communication.state_transfer import SentState, broadcast_tensors, leaves, outline
from unitrain.config import StrategyConfig
from unitrain.data.loop import CurrentBatch
from unitrain.device import devices_of
from unitrain.errors import UsageError
from unitrain.process import print_stderr
from unitrain.rng import derived_seed, seed_rank
from unitrain.training.models import batch_norm, in_sync, supported
from unitrain.training.models.buffers import make_writable
from unitrain.training.models.compile import compile_in_place
from unitrain.training.models.materialising import Initialise, Values, give_memory
from unitrain.training.models.passes import ModulePass
from unitrain.training.models.precision import remove_hooks
from unitrain.training.models.prepared import PreparedModules


@dataclass(eq=False)
class Preparation:
    """Implements ``prepare`` of a strategy.

    Attributes:
        communicator: of this process.
        backend: places and wraps modules.
        passes: changes of modules; the list may grow.
        prepared: records modules and their parameters.
        register: called with each optimizer.
        current_batch: tells BatchNorm layers of stand-ins.
        forget_dropped: forgets the modules and optimizers that the script has dropped; collective.
        config: the settings.
        wraps: whether the backend wraps modules: it averages their gradients, or there is one process.
        reader: number of this rank among those that have different batches.
        ranks_differ: whether the ranks draw different random numbers by now.
    """

    communicator: Communicator
    backend: Backend
    passes: Sequence[ModulePass]
    prepared: PreparedModules
    register: Callable[[Optimizer], object]
    current_batch: CurrentBatch
    forget_dropped: Callable[[], None]
    config: StrategyConfig
    wraps: bool
    reader: int
    ranks_differ: bool = False

    def prepare(self, objects: Sequence[Any], initialise: Initialise = False) -> tuple[Any, ...]:
        """Prepare objects. See ``Strategy.prepare``. Collective.

        Modules are prepared first, so that their parameters are known to optimizers.

        Args:
            objects: modules, optimizers and schedulers, in any order.
            initialise: see ``Strategy.prepare``.

        Returns:
            The objects in this order. Modules may be wrapped; optimizers and schedulers are changed in place.

        Raises:
            UsageError: an object is not supported.
            ConfigError: a module can't be changed as the settings say.
            CommunicationError: the ranks prepare different models or optimizers.
        """
        # Before any of them is changed, so that an interactive session can mend its call and repeat it.
        for item in objects:
            supported.check_kind(item)
        if self.prepared.count:
            self.forget_dropped()
        modules = [item for item in objects if isinstance(item, nn.Module)]
        if modules:
            for change in in_order(self.passes):
                change.inspect(modules)
        done = [self._module(item, initialise) if isinstance(item, nn.Module) else item for item in objects]
        for item in objects:
            if isinstance(item, Optimizer):
                self._optimizer(item)
        if not self.ranks_differ:
            self.ranks_differ = True
            # From here on, random numbers (dropout) differ between ranks that have different batches; rank 0 draws as a
            # single process does.
            if self.reader > 0:
                seed_rank(self.config.seed, self.reader)
        return tuple(done)

    def keep_random_states(self) -> None:
        """Record that the ranks' random number generators have been restored: ``prepare`` seeds them no more."""
        self.ranks_differ = True

    def _module(self, module: nn.Module, initialise: Initialise) -> nn.Module:
        """Place, change, compare and wrap a module, in this order. Return it, perhaps wrapped."""
        if module in self.prepared:
            raise UsageError(f"this {type(module).__name__} has already been prepared: prepare each module once.")
        supported.check_module(module)
        if self.communicator.world_size > 1:
            supported.check_lookups(module)
        plain = self.prepared.unwrap(module)
        parameters = dict(plain.named_parameters())  # which optimizers have; moving or sharding may replace them
        values = self._values(plain, initialise)
        self.backend.place(module)
        if self.communicator.is_main and len(devices := devices_of(module)) > 1:
            print_stderr(f"unitrain: the layers of {type(module).__name__} stay on {', '.join(map(str, devices))}.")
        for change in in_order(self.passes):
            change.apply(module)
        if self.communicator.world_size > 1:
            make_writable(module)
            in_sync.check_models(self.communicator, [*module.named_parameters(), *module.named_buffers()])
            if values is None:
                tensors = [*module.parameters(), *module.buffers()]
                broadcast_tensors(self.communicator, tensors, tensors)
        if self.config.compile:
            if self.communicator.world_size > 1:
                # Hooks that are added later would make the compiler start again.
                batch_norm.ignore_stand_ins([module], self.current_batch)
            compile_in_place(module, self.config)
        wrapped = self.backend.wrap_model(module) if self.wraps else module
        if values is not None:
            values.fill(plain)
        self.prepared.add(wrapped, module, parameters)
        return wrapped

    def _values(self, module: nn.Module, initialise: Initialise) -> Values | None:
        """Give tensors on the meta device memory. Return the source of their values; None if no tensor is there."""
        seed = derived_seed("initialise", self.config.seed, self.prepared.count)
        values = Values.of(self.communicator, module, initialise, seed)
        if values is not None:
            # FSDP gives parameters memory itself, a unit at a time.
            only = set(module.buffers()) if self.communicator.sharding.of_parameters else None
            give_memory(module, self.backend.device, only)
        return values

    def _optimizer(self, optimizer: Optimizer) -> None:
        """Give an optimizer its new parameters, and rank 0's state and options. Collective on several ranks."""
        self.prepared.update(optimizer)
        self.prepared.check([p for group in optimizer.param_groups for p in group["params"]])
        ranks = self.communicator
        if optimizer.state or ranks.world_size > 1:
            state = optimizer.state_dict()
            # State that is sharded already belongs to this rank.
            saved = state["state"]
            is_local = any(ranks.sharding.is_sharded(leaf) or isinstance(leaf, OwnedBy) for _, leaf in leaves(saved))
            expected = ranks.broadcast_object(outline(state) if saved and not is_local else None)
            if ranks.world_size > 1:
                # With its state, rank 0's options are loaded on the other ranks, too.
                in_sync.check_optimizers(ranks, self.prepared, optimizer, options=expected is None)
            if expected is not None:
                # This also moves state that was loaded or made before the parameters were moved to the device.
                SentState(ranks, expected, state).load_into(optimizer)
        self.register(optimizer)


def in_order(passes: Iterable[ModulePass]) -> list[ModulePass]:
    """Return passes in the order in which they are applied. Those of one place keep their order."""
    return sorted(passes, key=lambda change: change.place)


def export(module: nn.Module, backend: Backend, passes: Iterable[ModulePass]) -> nn.Module:
    """Return a plain copy of an original module on the CPU, in eval mode. Collective if it is sharded.

    Args:
        module: the original module, without wrappers.
        backend: gathers shards.
        passes: those that were applied to it. They are reverted in the opposite order.
    """
    plain = backend.sharding.copy_module(module).cpu().eval()
    for change in reversed(in_order(passes)):
        change.revert(plain)
    remove_hooks(plain)
    return plain
