"""The script's objects as parts of a checkpoint: modules, optimizers, loaders, dicts, and others with a state dict."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from unitrain.checkpoint.names import GROUPS, PARAMS, Name, in_order, names_of
from unitrain.checkpoint.writer import snapshot
from unitrain.communication.communicator import Communicator
from unitrain.communication.state_transfer import Form, SentState
from unitrain.data import Loader
from unitrain.data.structure import tensors
from unitrain.errors import CheckpointError
from unitrain.training.models.buffers import make_writable
from unitrain.training.models.prepared import PreparedModules
from unitrain.training.state_parts import StatePart

_MOST_BYTES = 2**20  # of an object's tensors; larger ones are weights, which code between epochs does not change
# What schedulers of a cycle change beside the learning rate.
_CYCLED = ("momentum", "betas")


class ObjectPart(StatePart):
    """The state of an object with ``state_dict`` and ``load_state_dict``, such as a scheduler.

    Attributes:
        name: the name of the object in the checkpoint, which is its key, too.
    """

    def __init__(self, name: str, value: Any) -> None:
        self.name: str = name
        self._value = value

    @property
    def key(self) -> str:
        """The key of the part in a checkpoint."""
        return self.name

    def state(self) -> Any:
        """Return this rank's state of the object."""
        return self._value.state_dict()

    def complete(self, state: Any) -> Any:
        """Return the state to save, given this rank's state. Collective."""
        return state

    def load(self, saved: SentState) -> None:
        """Load a saved state. Collective."""
        self._value.load_state_dict(saved.receive())

    def remember(self) -> Any:
        """Copy the part of the state that code between two epochs may change; None if there is none."""
        state = self.state()
        small = sum(tensor.nbytes for tensor in tensors(state, opened=True)) <= _MOST_BYTES
        return snapshot(state) if small else None

    def as_remembered(self, remembered: Any) -> Any:
        """Return this rank's state as it was when ``remember`` has returned this."""
        return self.state() if remembered is None else remembered


class DictPart(ObjectPart):
    """A dict of plain values."""

    def state(self) -> Any:
        """Return the dict."""
        return self._value

    def load(self, saved: SentState) -> None:
        """Load a saved state. Collective."""
        self._value.update(saved.receive())  # in place: the script goes on with this dict


class LoaderPart(ObjectPart):
    """The position of a loader. Of an iterable dataset, each rank knows the positions in its own shards only."""

    def __init__(self, name: str, value: Loader, communicator: Communicator) -> None:
        super().__init__(name, value)
        self._ranks = communicator

    def complete(self, state: Any) -> Any:
        """Return the state with the positions in all shards. Collective."""
        if self._ranks.world_size == 1 or "seeks" not in state:
            return state
        of_ranks = self._ranks.all_gather_object(state["seeks"])
        of_kinds = zip(*(of_rank[1:] for of_rank in of_ranks), strict=True)
        by_shard = [{tuple(seek[:2]): seek for seeks in kind for seek in seeks} for kind in of_kinds]
        return {**state, "seeks": [of_ranks[0][0], *(list(seeks.values()) for seeks in by_shard)]}


class ModulePart(ObjectPart):
    """The weights and buffers of a module, under the keys that it has without wrappers."""

    def __init__(self, name: str, value: nn.Module, prepared: PreparedModules) -> None:
        super().__init__(name, value)
        self._prepared = prepared

    @property
    def module(self) -> nn.Module:
        """The original module."""
        return self._prepared.unwrap(self._value)

    def state(self) -> Any:
        """Return the module's state."""
        return self.module.state_dict()

    def check(self, outline: Any, *, force: bool) -> None:
        """Raise CheckpointError unless the saved tensors are as the module's."""
        _check_is_state(self.name, outline)
        now = self.state()
        for key in [*now, *(key for key in outline if key not in now)]:
            here, there = (_shown(state.get(key)) for state in (now, outline))
            if here != there:
                raise CheckpointError(
                    f"the checkpoint belongs to another {self.name}: {key} is {there} in the checkpoint, but {here} in "
                    "this run. Nothing was loaded."
                )

    def load(self, saved: SentState) -> None:
        """Load a saved state. Collective."""
        make_writable(self.module)
        now = self.state()
        state = saved.receive(into=now)
        if not hasattr(state, "_metadata"):  # several ranks have not saved the versions of its layers
            values, state = state, copy.copy(now)
            state.update(values)
        self.module.load_state_dict(state)

    def remember(self) -> Any:
        """Return None: the code between two epochs does not change weights."""
        return None


class OptimizerPart(ObjectPart):
    """The state of an optimizer, and the options of its parameter groups."""

    def __init__(self, name: str, value: Optimizer) -> None:
        super().__init__(name, value)
        self.optimizer: Optimizer = value

    def names(self, modules: Mapping[str, nn.Module]) -> list[Name] | None:
        """Return the names of the optimizer's parameters in modules."""
        return names_of(self.optimizer, modules)

    def check(self, outline: Any, *, force: bool) -> None:
        """Raise CheckpointError unless the saved parameter groups are as large as the optimizer's."""
        _check_is_state(self.name, outline)
        groups = self.optimizer.param_groups, outline.get(GROUPS, [])
        now, saved = ([len(group.get(PARAMS, [])) for group in side] for side in groups)
        if now != saved:
            raise CheckpointError(
                f"{self.name} has parameter groups of {saved} parameters in the checkpoint, but of {now} in this run. "
                "Nothing was loaded."
            )

    def in_order(self, saved: Any, optimizer: str, order: list[int]) -> Any:
        """Return a saved state, or its outline, with the parameters in the order of this run."""
        return in_order(saved, order) if optimizer == self.name else saved

    def load(self, saved: SentState) -> None:
        """Load a saved state. Collective."""
        saved.load_into(self.optimizer)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn that it never stepped

    def load_with_options(self, saved: SentState) -> None:
        """Load a saved state, but leave the options of the parameter groups as they are. Collective."""
        options = self.remember()
        self.load(saved)
        for group, kept in zip(self.optimizer.param_groups, options, strict=True):
            group.update(kept)

    def remember(self) -> Any:
        """Return a copy of the options of the parameter groups."""
        groups = self.optimizer.param_groups
        return snapshot([{key: value for key, value in group.items() if key != PARAMS} for group in groups])

    def as_remembered(self, remembered: Any) -> Any:
        """Return the state with the options of parameter groups as they were."""
        state = self.state()
        # Not strict: the code between two epochs may have added a group.
        groups = [{**group, **options} for group, options in zip(state[GROUPS], remembered, strict=False)]
        return {**state, GROUPS: groups}

    def replaced_options(self, outline: Any) -> list[str]:
        """Return which options of the script's groups a saved state replaces, for a message.

        What a scheduler changes is left out, since it differs from the first value in any case.
        """
        replaced = []
        for now, saved in zip(self.optimizer.param_groups, outline[GROUPS], strict=True):
            scheduled = ["lr"] if "initial_lr" in now else []
            cycled = _CYCLED if "max_momentum" in now else []
            for key in now.keys() & saved.keys() - {PARAMS, *scheduled, *cycled}:
                here, there = now[key], saved[key]
                if not isinstance(there, (Tensor, Form)) and not isinstance(here, Tensor) and here != there:
                    replaced.append(f"{self.name}'s {key} is {there!r}, not {here!r}")
        return replaced


def part_of(name: str, value: Any, prepared: PreparedModules, communicator: Communicator) -> ObjectPart:
    """Return the part of a checkpoint that an object of the script is."""
    if isinstance(value, nn.Module):
        return ModulePart(name, value, prepared)
    if isinstance(value, Optimizer):
        return OptimizerPart(name, value)
    if isinstance(value, Loader):
        return LoaderPart(name, value, communicator)
    return DictPart(name, value) if isinstance(value, dict) else ObjectPart(name, value)


def _check_is_state(name: str, outline: Any) -> None:
    if not isinstance(outline, dict):
        raise CheckpointError(
            f"{name} in the checkpoint is a {type(outline).__name__}, and no state. Nothing was loaded."
        )


def _shown(value: Any) -> str:
    if isinstance(value, (Tensor, Form)):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "missing" if value is None else type(value).__name__
