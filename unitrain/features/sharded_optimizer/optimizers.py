"""Optimizers that each update a part of the parameters on each rank, and have its state only (``shard_optimizer``).

Each rank owns whole parameters (ZeRO-1: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020, first stage), so any optimizer that updates each parameter by itself works. Gradients are
averaged as otherwise, so all ranks check and clip them identically. Scripts and schedulers see all of the model's
parameters in the groups. Only while the optimizer steps, they have the ones of this rank. Then the owners send them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.communication.communicator import Communicator
from unitrain.communication.sharding import OwnedBy, divided, refuse
from unitrain.errors import UsageError
from unitrain.features.sharded_optimizer.exchange import Exchange
from unitrain.training.feature import Feature
from unitrain.training.loop.sockets import Sockets

# How the names of optimizers begin that estimate one value for the whole model. A rank would do so for its part.
_ESTIMATING = ("DAdapt", "DoG", "DoWG", "Mechanic", "Prodigy")


class ShardedOptimizers(Feature):
    """Shards the optimizers of a run with several processes, unless the backend shards more than that."""

    place = 10

    def __init__(self) -> None:
        self._sharded: WeakKeyDictionary[Optimizer, _ShardedOptimizer] = WeakKeyDictionary()
        self._names = count()

    def plug_in(self, sockets: Sockets) -> None:
        """Shard every optimizer that is trained with."""
        self._communicator = communicator = sockets.communicator
        self._loads = [0] * communicator.world_size  # elements of each rank
        if communicator.world_size > 1 and not sockets.backend.shards:
            communicator.sharding.divide_optimizers()
            super().plug_in(sockets)

    def registered(self, optimizer: Optimizer) -> None:
        """Shard an optimizer, or parameters that were added to it since this was called before."""
        if optimizer not in self._sharded:
            _refuse_coupled(optimizer)
            _refuse_own_state_dict(optimizer)
            name = f"parameters of optimizer {next(self._names)}"
            self._sharded[optimizer] = _ShardedOptimizer(optimizer, self._communicator, name)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        owners = self._communicator.sharding.owners
        owners.update(divided([p for p in parameters if p not in owners], self._loads))
        self._sharded[optimizer].lay_out(optimizer)

    def keep(self, optimizers: Sequence[Optimizer], parameters: Collection[Parameter]) -> None:
        """Forget the owners of other parameters."""
        owners = self._communicator.sharding.owners
        for parameter in [p for p in owners if p not in parameters]:
            del owners[parameter]

    def watched(self, optimizer: Optimizer, trained: Sequence[Parameter]) -> None:
        """Shard parameters that were added to an optimizer."""
        self.registered(optimizer)

    def before_update(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> None:
        """Let the hooks of scripts see all parameters."""
        self._sharded[optimizer].move_hooks(optimizer)

    def after_error(self, optimizer: Optimizer) -> None:
        """Give an optimizer the model's parameters back, if its step has raised an error."""
        if optimizer in self._sharded:
            self._sharded[optimizer].abandon(optimizer)


class _ShardedOptimizer:
    """One optimizer, and its hooks."""

    def __init__(self, optimizer: Optimizer, communicator: Communicator, name: str) -> None:
        self._communicator = communicator
        self._name = name
        self._of_rank: list[list[Parameter]] = []  # what each group has during a step
        self._all: list[list[Parameter]] = []  # and before and after it
        self._stand_ins: dict[Parameter, Sequence[Parameter]] = {}
        self._their_state: dict[Any, Any] = {}
        self._depth = 0  # a class may call the step of its base class, with the same hooks
        self._pre_hook = optimizer.register_step_pre_hook(self._enter)
        self._post_hook = optimizer.register_step_post_hook(self._leave)
        optimizer.register_state_dict_post_hook(self._with_owners)
        optimizer.register_load_state_dict_pre_hook(self._without_others)
        optimizer.register_load_state_dict_post_hook(_guard_state)

    def lay_out(self, optimizer: Optimizer) -> None:
        """Follow changes of the optimizer's groups, and forget state that other ranks have."""
        owners, rank = self._communicator.sharding.owners, self._communicator.rank
        owned: list[list[Parameter]] = [[] for _ in range(self._communicator.world_size)]
        self._of_rank, self._stand_ins, self._their_state = [], {}, {}
        for group in optimizer.param_groups:
            trained = [p for p in group["params"] if p.requires_grad]
            # Frozen ones stay in each rank's group: they cost nothing, and no rank updates them.
            updated = [p for p in group["params"] if owners[p] == rank or not p.requires_grad]
            for p in group["params"]:
                if owners[p] != rank:
                    optimizer.state.pop(p, None)
            for p in trained:
                owned[owners[p]].append(p)
            if trained and all(owners[p] != rank for p in trained):
                updated.append(self._standing_in_for(trained))
            self._of_rank.append(updated)
        _guard_state(optimizer)
        self._exchange = Exchange(self._communicator, owned, self._name)

    def _standing_in_for(self, parameters: Sequence[Parameter]) -> Parameter:
        """Return a parameter of one element for a group that this rank owns nothing of.

        An optimizer may count steps in a group's options, which are the same on all ranks, or fail without parameters.
        """
        stand_in = Parameter(torch.zeros_like(parameters[0].detach()[(slice(1),) * parameters[0].dim()]))
        self._stand_ins[stand_in] = parameters
        return stand_in

    def move_hooks(self, optimizer: Any) -> None:
        """Let the hooks of scripts see all parameters."""
        optimizer._optimizer_step_pre_hooks.move_to_end(self._pre_hook.id)
        optimizer._optimizer_step_post_hooks.move_to_end(self._post_hook.id, last=False)

    def _enter(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Give the optimizer the parameters of this rank."""
        if self._communicator.collectives.closed:
            raise UsageError("with shard_optimizer, an optimizer can't step after strategy.close(): step it before.")
        self._depth += 1
        if self._depth > 1:
            return
        for stand_in, parameters in self._stand_ins.items():
            # As on the owner's rank, an optimizer that leaves out parameters without gradients makes a step, or none.
            stand_in.grad = torch.zeros_like(stand_in) if any(p.grad is not None for p in parameters) else None
        optimizer.state.update(self._their_state)
        self._all = [group["params"] for group in optimizer.param_groups]
        for group, updated in zip(optimizer.param_groups, self._of_rank, strict=False):  # later groups are frozen
            group["params"] = updated

    def _leave(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Give the optimizer the model's parameters back, and send those that it has updated."""
        self._depth -= 1
        if self._depth:
            return
        self._put_back(optimizer)
        self._exchange()

    def abandon(self, optimizer: Optimizer) -> None:
        """Give the optimizer the model's parameters back, if it has this rank's."""
        if self._depth:
            self._depth = 0
            self._put_back(optimizer)

    def _put_back(self, optimizer: Optimizer) -> None:
        for group, parameters in zip(optimizer.param_groups, self._all, strict=True):
            group["params"] = parameters
        self._their_state = {p: optimizer.state.pop(p) for p in self._stand_ins if p in optimizer.state}

    def _with_owners(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict with an ``OwnedBy`` in place of each state that another rank has."""
        others = {number: OwnedBy(owner) for number, owner in self._others(optimizer, state_dict)}
        return {**state_dict, "state": {**state_dict["state"], **others}}

    def _without_others(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict without the states of parameters that other ranks own."""
        others = dict(self._others(optimizer, state_dict))
        state = {number: entry for number, entry in state_dict["state"].items() if number not in others}
        if any(isinstance(entry, OwnedBy) for entry in state.values()):  # it was another rank's when it was saved
            refuse()
        return {**state_dict, "state": state}

    def _others(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Iterator[tuple[Any, int]]:
        """Yield the numbers, in a state dict, of the parameters that other ranks own, and the ranks."""
        rank = self._communicator.rank
        for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=False):
            for number, p in zip(saved["params"], group["params"], strict=False):
                owner = self._communicator.sharding.owners.get(p, rank)
                if owner != rank:
                    yield number, owner


def _refuse_coupled(optimizer: Optimizer) -> None:
    """Raise UsageError if an optimizer is known to update a parameter by others, which other ranks may own."""
    estimates = any(kind.__name__.startswith(_ESTIMATING) for kind in type(optimizer).__mro__)
    # The option of Apex's, NVIDIA's and timm's LAMB, which clip by the norm of all gradients.
    if estimates or any(group.get("max_grad_norm") for group in optimizer.param_groups):
        raise UsageError(
            f"shard_optimizer does not support this {type(optimizer).__name__}: it computes a value from all "
            "parameters or gradients, of which each rank has a part. Set shard_optimizer to false, or use an optimizer "
            "such as AdamW or Muon. (Of a LAMB, set max_grad_norm to None, and the setting clip_norm.)"
        )


def _refuse_own_state_dict(optimizer: Optimizer) -> None:
    """Raise UsageError if an optimizer's state dict would have the state of one rank's parameters only."""
    called = []
    hook = optimizer.register_state_dict_post_hook(lambda *_: called.append(True))
    optimizer.state_dict()
    hook.remove()
    if not called:
        raise UsageError(
            f"shard_optimizer does not support {type(optimizer).__name__}: its state_dict() would return one rank's "
            "state, since it does not call torch.optim.Optimizer's. Have it do so, or set shard_optimizer to false."
        )


class _OwnState(defaultdict[Any, Any]):
    """The state of the parameters that this rank owns, which can't be copied and pickled without losing the others'."""

    def __reduce__(self) -> NoReturn:
        refuse()


def _guard_state(optimizer: Optimizer) -> None:
    """Refuse copies of an optimizer, which would have the state of one rank's parameters only."""
    if not isinstance(optimizer.state, _OwnState):
        optimizer.state = _OwnState(dict, optimizer.state)
