"""``strategy.prepare``: prepares modules, optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from unitrain.communication.backend import Backend
from unitrain.communication.communicator import Communicator
from unitrain.communication.owned import OwnedBy
from unitrain.communication.state_transfer import broadcast_tensors, leaves, outline, receive_optimizer
from unitrain.config import StrategyConfig
from unitrain.data.loop import CurrentBatch
from unitrain.device import devices_of
from unitrain.errors import UsageError
from unitrain.process import print_stderr
from unitrain.rng import derived_seed, seed_rank
from unitrain.training.models import batch_norm, comparison, supported
from unitrain.training.models.compile import compile_in_place
from unitrain.training.models.materialising import Initialise, Values, WithoutWeights, give_memory
from unitrain.training.models.passes import ModulePass
from unitrain.training.models.precision import remove_hooks
from unitrain.training.models.prepared import PreparedModules


class Preparation:
    """Implements ``prepare`` of a strategy.

    ``register`` is called with each optimizer. The backend wraps modules if ``wraps``: it averages their gradients, or
    there is one process.
    """

    def __init__(
        self,
        communicator: Communicator,
        backend: Backend,
        passes: Sequence[ModulePass],
        prepared: PreparedModules,
        register: Callable[[Optimizer], object],
        current_batch: CurrentBatch,
        config: StrategyConfig,
        *,
        wraps: bool,
    ) -> None:
        self._communicator = communicator
        self._backend = backend
        self._passes = passes
        self._prepared = prepared
        self._register = register
        self._current_batch = current_batch
        self._wraps = wraps
        self._config = config
        self._ranks_differ = False  # in the random numbers that they draw

    def prepare(self, objects: Sequence[Any], initialise: Initialise = False) -> tuple[Any, ...]:
        """See ``Strategy.prepare``. Modules are prepared first, so that their parameters are known to optimizers."""
        for one in objects:
            supported.check_kind(one)
        modules = [one for one in objects if isinstance(one, nn.Module)]
        if modules:
            for each in in_order(self._passes):
                each.inspect(modules)
        done = {i: self._module(one, initialise) for i, one in enumerate(objects) if isinstance(one, nn.Module)}
        for one in objects:
            if isinstance(one, Optimizer):
                self._optimizer(one)
        if not self._ranks_differ:
            self._ranks_differ = True
            # From here on, random numbers (dropout) differ between ranks; rank 0 draws as a single process does.
            if self._communicator.rank > 0:
                seed_rank(self._config.seed, self._communicator.rank)
        return tuple(done.get(i, one) for i, one in enumerate(objects))

    def keep_random_states(self) -> None:
        """Record that the ranks' random number generators have been restored: ``prepare`` seeds them no more."""
        self._ranks_differ = True

    def _module(self, module: nn.Module, initialise: Initialise) -> nn.Module:
        if module in self._prepared:
            raise UsageError(f"this {type(module).__name__} has already been prepared: prepare each module once.")
        supported.check_module(module)
        if self._communicator.world_size > 1:
            supported.check_lookups(module)
        plain = self._prepared.unwrap(module)
        parameters = dict(plain.named_parameters())
        values = self._values(plain, initialise)
        self._place(module)
        for each in in_order(self._passes):
            each.apply(module)
        if self._communicator.world_size > 1:
            comparison.check_models(self._communicator, [*module.named_parameters(), *module.named_buffers()])
            if values is None:
                own = [*module.parameters(), *module.buffers()]
                broadcast_tensors(self._communicator, own, own)
        if self._config.compile:
            if self._communicator.world_size > 1:
                # Hooks that are added later would make the compiler start again.
                batch_norm.ignore_stand_ins([module], self._current_batch)
            compile_in_place(module, self._config)
        wrapped = self._backend.wrap_model(module) if self._wraps else module
        if values is not None:
            values.fill(plain)
            if values.unknown:
                self._prepared.refuse_calls(plain, WithoutWeights(plain, values.unknown).end)
        self._prepared.add(wrapped, module)
        self._prepared.add_names(module)
        self._prepared.replace(parameters, module)
        return wrapped

    def _values(self, module: nn.Module, initialise: Initialise) -> Values | None:
        """Return where the values of tensors come from that are on the meta device, and give them memory."""
        seed = derived_seed("initialise", self._config.seed, sum(1 for _ in self._prepared))
        values = Values.of(self._communicator, module, initialise, seed)
        if values is not None:
            # FSDP gives parameters memory itself, a unit at a time.
            only = set(module.buffers()) if self._communicator.sharding.of_parameters else None
            give_memory(module, self._backend.device, only)
        return values

    def _place(self, module: nn.Module) -> None:
        """Place a module, and say so where a script may have meant another place."""
        before = devices_of(module)
        self._backend.place(module)
        now = devices_of(module)
        if not self._communicator.is_main:
            return
        if len(now) > 1:
            print_stderr(f"unitrain: the layers of {type(module).__name__} stay on {', '.join(map(str, now))}.")
        elif before != now and before[0].type not in ("cpu", "meta"):
            print_stderr(f"unitrain: {type(module).__name__} is moved from {before[0]} to {now[0]}, this run's device.")

    def _optimizer(self, optimizer: Optimizer) -> None:
        supported.check_optimizer(optimizer, shards_parameters=self._communicator.sharding.of_parameters)
        self._prepared.update(optimizer)
        self._prepared.check([p for group in optimizer.param_groups for p in group["params"]])
        ranks = self._communicator
        if optimizer.state or ranks.world_size > 1:
            state = optimizer.state_dict()
            # State that is sharded already belongs to this rank.
            its = state["state"]
            own_is_kept = any(ranks.sharding.is_sharded(one) or isinstance(one, OwnedBy) for _, one in leaves(its))
            expected = ranks.broadcast_object(outline(state) if its and not own_is_kept else None)
            if ranks.world_size > 1:
                # With its state, rank 0's options are loaded on the other ranks, too.
                comparison.check_optimizers(ranks, self._prepared, optimizer, options=expected is None)
            if expected is not None:
                # This also moves state that was loaded or made before the parameters were moved to the device.
                receive_optimizer(ranks, optimizer, expected, state)
        self._register(optimizer)


def in_order(passes: Iterable[ModulePass]) -> list[ModulePass]:
    """Return passes in the order in which they are applied."""
    return sorted(passes, key=lambda each: each.place)


def export(module: nn.Module, backend: Backend, passes: Iterable[ModulePass]) -> nn.Module:
    """Return a plain copy of an original module on the CPU, in eval mode. Collective if it is sharded."""
    plain = backend.sharding.copy_module(module).cpu().eval()
    for each in reversed(in_order(passes)):
        each.revert(plain)
    remove_hooks(plain)
    return plain
