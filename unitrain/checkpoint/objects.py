"""The script's objects as parts of a checkpoint: modules, optimizers, loaders, dicts, and others with a state dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from unitrain.checkpoint.names import GROUPS, PARAMS, in_order, names_of
from unitrain.checkpoint.store.torch_files import plain
from unitrain.checkpoint.writer import snapshot
from unitrain.communication.communicator import Communicator
from unitrain.communication.state_transfer import Form, SentState
from unitrain.communication.structure import tensors
from unitrain.data import Loader
from unitrain.errors import CheckpointError
from unitrain.training.models.buffers import make_writable
from unitrain.training.models.prepared import PreparedModules
from unitrain.training.state_parts import StatePart

# Options that decide which tensors the state of a parameter has.
_OF_STATES = ("amsgrad", "centered", "momentum")
# What schedulers add to the options of parameter groups.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
NEW_RUN = (
    "begin a new run in another folder: `unitrain checkpoint merge` writes the weights to a file, which strategy.load "
    "reads"
)
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

    @property
    def class_name(self) -> str:
        """The name of the object's class."""
        return type(self._value).__name__

    def state(self) -> Any:
        """Return this rank's state of the object."""
        return plain(self._value.state_dict())

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
        return plain(dict(self._value))

    def load(self, saved: SentState) -> None:
        """Load a saved state. Collective."""
        refilled: set[int] = set()
        for key, value in saved.receive().items():
            self._value[key] = _refilled(self._value.get(key), value, refilled)


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
        now = self.state()
        for key in [*now, *(key for key in outline if key not in now)]:
            here, there = (_shown(state.get(key)) for state in (now, outline))
            if here != there:
                raise CheckpointError(
                    f"the checkpoint belongs to another {self.name}: {key} is {there} in the checkpoint, but {here} in "
                    "this run. Build the model as it was, or use another folder. Nothing was loaded."
                )

    def load(self, saved: SentState) -> None:
        """Load a saved state. Collective."""
        make_writable(self.module)
        state = self.state()
        state.update(saved.receive(into=state))  # and keeps the versions of layers, which several ranks do not save
        self.module.load_state_dict(state)

    def remember(self) -> Any:
        """Return None: the code between two epochs does not change weights."""
        return None


class OptimizerPart(ObjectPart):
    """The state of an optimizer, and the options of its parameter groups."""

    def __init__(self, name: str, value: Optimizer) -> None:
        super().__init__(name, value)
        self.optimizer: Optimizer = value

    def state(self) -> Any:
        """Return this rank's state of the optimizer."""
        state = self._value.state_dict()
        return {**state, GROUPS: plain(state[GROUPS])}

    def names(self, modules: Mapping[str, nn.Module]) -> list[str]:
        """Return the names of the optimizer's parameters in modules."""
        return names_of(self.optimizer, modules)

    def check(self, outline: Any, *, force: bool) -> None:
        """Raise CheckpointError unless a saved state is of parameter groups as large, and of such an optimizer.

        With ``force``, tensors in the state may be missing.
        """
        groups = self.optimizer.param_groups, outline.get(GROUPS, [])
        now, saved = ([len(group.get(PARAMS, [])) for group in side] for side in groups)
        if now != saved:
            raise CheckpointError(
                f"{self.name} has parameter groups of {saved} parameters in the checkpoint, but of {now} in this run. "
                "Nothing was loaded."
            )
        for group, of_saved in zip(self.optimizer.param_groups, outline[GROUPS], strict=True):
            missing = self.optimizer.defaults.keys() - of_saved.keys()
            unknown = of_saved.keys() - group.keys() - _OF_SCHEDULERS
            if missing and unknown:  # another version of the library has more options, or fewer
                raise another_class(
                    self.name, f"an optimizer with {', '.join(sorted(unknown))}", self.class_name, NEW_RUN
                )
            for key in group.keys() & of_saved.keys() & set(_OF_STATES if "max_momentum" not in group else ()):
                if bool(group[key]) != bool(of_saved[key]) and not force:
                    raise CheckpointError(
                        f"{self.name}'s {key} is {of_saved[key]!r} in the checkpoint, but {group[key]!r} in this run, "
                        f"and its state depends on that. Make the optimizer with {key}={of_saved[key]!r}, or call "
                        "resume(force=True), which keeps that, or use another folder. Nothing was loaded."
                    )

    def in_order(self, saved: Any, optimizer: str, order: list[int]) -> Any:
        """Return a saved state, or its outline, with the parameters in the order of this run."""
        return in_order(saved, order) if optimizer == self.name else saved

    def load(self, saved: SentState) -> None:
        """Load a saved state. Collective."""
        saved.load_into(self.optimizer)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn that it never stepped

    def load_with_options(self, saved: SentState, *, replaced: Sequence[str] = ()) -> None:
        """Load a saved state, but leave the options of the parameter groups that are not ``replaced``. Collective."""
        options = [
            {key: value for key, value in group.items() if key not in (PARAMS, *replaced)}
            for group in self.optimizer.param_groups
        ]
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


def _refilled(value: Any, saved: Any, refilled: set[int]) -> Any:
    """Return a dict or a list of the script with the saved content, in place; or the saved value, if it is no such.

    Args:
        value: the script's object.
        saved: what a checkpoint has in its place.
        refilled: the ids of those that have their content already, and can't have another one, too.
    """
    if id(value) in refilled:
        return saved
    if isinstance(value, dict) and isinstance(saved, dict):
        refilled.add(id(value))
        items = {key: _refilled(value.get(key), item, refilled) for key, item in saved.items()}
        value.clear()
        for key, item in items.items():  # the update() of a Counter adds
            value[key] = item
        return value
    if isinstance(value, list) and isinstance(saved, list):
        refilled.add(id(value))
        olds = [*value, *[None] * len(saved)]
        value[:] = [_refilled(old, item, refilled) for old, item in zip(olds, saved, strict=False)]
        return value
    return saved


def another_class(name: str, saved: str, now: str, remedy: str) -> CheckpointError:
    """Return the error that the state of an optimizer or a scheduler is of another class."""
    return CheckpointError(
        f"{name} is {saved} in the checkpoint, but {now} in this run, which can't continue from its state. Make it as "
        f"it was, or {remedy}. Nothing was loaded."
    )


def _shown(value: Any) -> str:
    if isinstance(value, (Tensor, Form)):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "missing" if value is None else type(value).__name__
