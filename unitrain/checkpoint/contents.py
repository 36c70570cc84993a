"""``Contents``: all that the checkpoints of a run consist of, as parts that collect, check and load themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unitrain import rng
from unitrain.checkpoint.names import GROUPS, numbers_before, numbers_of
from unitrain.checkpoint.objects import (
    NEW_RUN,
    DictPart,
    LoaderPart,
    ModulePart,
    ObjectPart,
    OptimizerPart,
    another_class,
)
from unitrain.checkpoint.schedules import SchedulerPart
from unitrain.checkpoint.sharded.loading import CheckpointView
from unitrain.checkpoint.store.located import RUN
from unitrain.communication import plain_data
from unitrain.communication.communicator import Communicator
from unitrain.communication.state_transfer import SentState
from unitrain.data import Loader
from unitrain.errors import CheckpointError, UsageError
from unitrain.process import print_stderr
from unitrain.rng import seed_rank
from unitrain.training.loop.sockets import Sockets
from unitrain.training.loop.step import TrainingStep
from unitrain.training.state_parts import FEATURE, StatePart, States


@dataclass(eq=False)
class RunPart(ObjectPart):
    """The state of the run itself: its number of steps, random number generators, and small states of features.

    Attributes:
        communicator: the communicator of this process.
        readers: the ranks that draw different random numbers.
        step: counts the steps.
        states: small states by name.
        names: returns the names of the parameters of each optimizer.
        classes: the names of the classes of optimizers and schedulers.
        seed: of the random number generators, on another number of ranks.
        restored: called when random number generators have been restored.
    """

    name = RUN
    communicator: Communicator
    readers: Communicator
    step: TrainingStep
    states: States
    names: Callable[[], dict[str, list[str]]]
    classes: Mapping[str, str]
    seed: int
    restored: Callable[[], None]
    _reported: set[str] = field(default_factory=set)  # unused states, with a warning printed

    def state(self) -> Any:
        """Return the state of this rank's random number generators."""
        return rng.capture()

    def complete(self, state: Any) -> Any:
        """Return the state of the run, given that of this rank's random number generators. Collective.

        Warn of small states that were loaded, and that nothing in this run has taken until now.
        """
        if self.communicator.is_main:
            for name in self.states.waiting.keys() - self._reported:
                _warn_of_unknown(name)
        self._reported = set(self.states.waiting)
        # As bytes: of thousands of ranks, no rank needs the states of the others, and one tensor is saved.
        data, ranks = plain_data.encode(state), self.readers.collectives
        sizes = ranks.all_gather(torch.tensor(len(data), device=ranks.device)).tolist()
        return {
            "steps": self.step.global_step,
            "features": self.states.collect(),
            "random": {"sizes": sizes, "states": torch.cat(ranks.all_gather_padded(data, sizes)).cpu()},
            "names": json.dumps(self.names()),  # a string is copied in less time than all its lists
            "classes": self.classes,
        }

    def load(self, saved: SentState) -> None:
        """Load a saved state. Collective."""
        state, rank = saved.receive(), self.readers.rank
        sizes = state["random"]["sizes"]
        self.step.global_step = state["steps"]
        self.states.load(state.get("features", {}))
        # Of another number of ranks, no generator is this rank's: two ranks could draw the same numbers.
        if len(sizes) == self.readers.world_size:
            rng.restore(plain_data.decode(torch.split(state["random"]["states"], sizes)[rank]))
        else:
            seed_rank(self.seed, state["steps"], rank)
        self.restored()


class Contents:
    """The parts of a run's checkpoints.

    Args:
        objects: the script's objects by name, with ``state_dict`` and ``load_state_dict``, or dicts of plain values.
        sockets: have the parts and the small states of features.
        step: counts the steps.
        restored: called when random number generators have been restored.

    Attributes:
        objects: the script's objects.
        of_objects: their parts, by name.
        modules: the original modules, by name.
        optimizers: the parts of optimizers.
        schedulers: the parts of schedulers.
        names: returns the names of the parameters of each optimizer.

    Raises:
        UsageError: an object has no state, or a name is not that of a file.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        sockets: Sockets,
        step: TrainingStep,
        restored: Callable[[], None],
    ) -> None:
        self._sockets = sockets
        ranks = sockets.communicator, sockets.readers
        self._run = RunPart(*ranks, step, sockets.states, dict, {}, sockets.config.seed, restored)
        self.replace(objects)

    def replace(self, objects: Mapping[str, Any]) -> None:
        """Consist of these objects from now on. Those before are free."""
        for name, value in objects.items():
            if not isinstance(value, dict) and not callable(getattr(value, "load_state_dict", None)):
                raise UsageError(
                    f"checkpoint: {name} is a {type(value).__name__}, which has no load_state_dict: pass an object "
                    "with state_dict and load_state_dict, or a dict."
                )
            if name in (RUN, "") or name.startswith(FEATURE) or "/" in name or "\0" in name:
                raise UsageError(f"checkpoint: {name!r} can't be the name of an object, which is that of a file, too.")
        self.objects: dict[str, Any] = dict(objects)
        self.of_objects: dict[str, ObjectPart] = {
            name: _part_of(name, value, self._sockets) for name, value in objects.items()
        }
        parts = self.of_objects.items()
        self.modules: dict[str, nn.Module] = {name: part.module for name, part in parts if isinstance(part, ModulePart)}
        self.optimizers: dict[str, OptimizerPart] = {n: part for n, part in parts if isinstance(part, OptimizerPart)}
        self.schedulers: dict[str, SchedulerPart] = {n: part for n, part in parts if isinstance(part, SchedulerPart)}
        originals = {**objects, **self.modules}
        self._of_features = [part for make in self._sockets.parts if (part := make(originals)) is not None]
        # Not of self: a cycle would keep the models of a run.
        self.names: Callable[[], dict[str, list[str]]] = partial(_names, self.modules, self.optimizers)
        self._run.names = self.names
        self._run.classes = {name: part.class_name for name, part in {**self.optimizers, **self.schedulers}.items()}

    @property
    def has_loader(self) -> bool:
        """Whether a loader is among the objects."""
        return any(isinstance(part, LoaderPart) for part in self.of_objects.values())

    @property
    def nbytes(self) -> int:
        """Size of the modules' states."""
        states = [value for module in self.modules.values() for value in module.state_dict().values()]
        return sum(value.nbytes for value in states if isinstance(value, Tensor))

    def collect(self, remembered: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the states of all parts by key. Collective.

        Args:
            remembered: what ``remember`` has returned: what it has is as it was then.
        """
        states: dict[str, Any] = {}
        for part in (*self.of_objects.values(), self._run):
            now = part.state() if remembered is None else part.as_remembered(remembered[part.key])
            states[part.key] = part.complete(now)
        for extra in self._of_features:
            state = extra.collect()
            if state is not None:
                states[extra.key] = state
        return states

    def remember(self) -> dict[str, Any]:
        """Copy the states that code between two epochs may change. Return the copies by key."""
        return {part.key: part.remember() for part in (*self.of_objects.values(), self._run)}

    def waiting(self, view: CheckpointView) -> set[str]:
        """Return the names of the states in a checkpoint that this run has no object of."""
        return {key for key in view.outlines if key != RUN and not key.startswith(FEATURE)} - self.of_objects.keys()

    def fit(self, view: CheckpointView, *, force: bool, new_options: bool = False) -> None:
        """Put optimizers' parameters in the order of this run. Raise CheckpointError unless saved states fit this run.

        States of features that this run does not use are left out, with a warning.

        Args:
            view: the checkpoint.
            force: whether to load what can be loaded of states that don't fit.
            new_options: as of ``load``.
        """
        outlines = view.outlines
        expected, waiting = self.of_objects.keys(), self.waiting(view)
        if not expected <= outlines.keys():
            saved = sorted(waiting | expected & outlines.keys())
            raise CheckpointError(
                f"the checkpoint contains {', '.join(saved)}, but this run has {', '.join(sorted(expected))}: pass the "
                "same objects, by the same names. Nothing was loaded."
            )
        classes = outlines[RUN]["classes"]
        for name in sorted(classes.keys() & expected):
            was, part = classes[name], self.of_objects[name]
            is_scheduler = isinstance(part, SchedulerPart)
            if was != part.class_name and not (new_options if is_scheduler else force):
                remedy = "use resume(new_options=True), which follows the new schedule" if is_scheduler else NEW_RUN
                raise another_class(name, was, part.class_name, remedy)
        for name in expected:
            # A state that lacks tensors can't be used with options that need them.
            self.of_objects[name].check(outlines[name], force=force and not new_options)
        self._order_by_name(view)  # features have states of these parameters, too
        of_features = {part.key: part for part in self._of_features}
        # Only with the last objects: a feature's state is of several.
        for key in (key for key in outlines if not waiting and key.startswith(FEATURE)):
            if key in of_features:
                of_features[key].check(outlines[key], force=force)
            elif self._sockets.communicator.is_main:
                _warn_of_unknown(key.removeprefix(FEATURE))

    def _order_by_name(self, view: CheckpointView) -> None:
        """Put the saved state of each optimizer's parameters in the order that they have now.

        Raises CheckpointError if a parameter group has other parameters.
        """
        outlines = view.outlines
        for name, now in self.names().items():
            saved = outlines[RUN]["names"].get(name)
            if saved is None or numbers_of(len(now)) in (saved, now):
                continue  # there are only numbers to go by
            if saved != now:
                order = numbers_before(name, outlines[name][GROUPS], saved, now)
                parts: list[StatePart] = [self.of_objects[name], *self._of_features]
                for states in (outlines,) if view.saved is None else (outlines, view.saved.parts):
                    states.update(
                        {part.key: part.in_order(states[part.key], name, order) for part in parts if part.key in states}
                    )
                outlines[RUN]["names"][name] = now

    def replaced_options(self, view: CheckpointView, names: Set[str], *, new_options: bool) -> list[str]:
        """Return which options of the script the states of a checkpoint replace, for a message.

        Args:
            view: the checkpoint.
            names: as of ``load``.
            new_options: as of ``load``.
        """
        outlines = view.outlines
        parts: list[OptimizerPart | SchedulerPart] = [*self.optimizers.values(), *self.schedulers.values()]
        if new_options:
            parts = [part for part in self.schedulers.values() if not part.follows_steps]
        saved = [part for part in parts if part.key in names & outlines.keys()]
        return sorted({option for part in saved for option in part.replaced_options(outlines[part.key])})

    def load(self, view: CheckpointView, names: Set[str], *, new_options: bool) -> None:
        """Load states of a checkpoint. Collective.

        The state of the run is loaded each time: making an object may draw random numbers. Those of features come last.

        Args:
            view: the checkpoint.
            names: the names of the objects to load.
            new_options: whether to keep the options of optimizers and schedulers as the script has made them.
        """
        # Loaders first: they refuse other data before the model is changed.
        weights = *self.modules, *self.optimizers
        named = [part for name, part in self.of_objects.items() if name in names]
        objects = sorted(named, key=lambda part: (part.name in weights, part.name))
        for part in (*objects, self._run, *(() if self.waiting(view) else self._of_features)):
            if part.key not in view.outlines:  # of a feature that was not in use then
                continue
            state = view.state(part.key)
            if new_options and isinstance(part, SchedulerPart) and part.follows_steps:
                part.load_with_options(state)
            elif new_options and isinstance(part, OptimizerPart):
                part.load_with_options(state, replaced=["lr"] if self._measures(part.optimizer) else [])
            else:
                part.load(state)

    def _measures(self, optimizer: Optimizer) -> bool:
        """Return whether the learning rate of an optimizer does not follow from the number of steps."""
        following = [name for name, part in self.schedulers.items() if part.follows_steps]
        others = [value for name, value in self.objects.items() if name not in following]
        return any(getattr(value, "optimizer", None) is optimizer for value in others)

    def load_trained(self, view: CheckpointView) -> None:
        """Load modules and the states of optimizers, but not their options. Collective."""
        for name, part in sorted(self.of_objects.items()):
            if isinstance(part, OptimizerPart):
                part.load_with_options(view.state(name))
            elif isinstance(part, ModulePart):
                part.load(view.state(name))


def _part_of(name: str, value: Any, sockets: Sockets) -> ObjectPart:
    """Return the part of a checkpoint that an object of the script is."""
    if isinstance(value, nn.Module):
        return ModulePart(name, value, sockets.prepared)
    if isinstance(value, Optimizer):
        return OptimizerPart(name, value)
    if isinstance(value, LRScheduler):
        return SchedulerPart(name, value)
    if isinstance(value, Loader):
        return LoaderPart(name, value, sockets.communicator)
    return DictPart(name, value) if isinstance(value, dict) else ObjectPart(name, value)


def _warn_of_unknown(name: str) -> None:
    print_stderr(f"unitrain: the checkpoint has the state of {name}, which this run does not use: it is left out.")


def _names(modules: Mapping[str, nn.Module], optimizers: Mapping[str, OptimizerPart]) -> dict[str, list[str]]:
    """Return the names of the parameters of each optimizer."""
    return {name: part.names(modules) for name, part in optimizers.items()}
