"""Parts of a run's state that make a checkpoint. Each collects, checks and loads itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from unitrain.communication.state_transfer import SentState
from unitrain.errors import UsageError

FEATURE = "_feature."
"""Begins the keys of features' parts, as no name of a script's object does."""


class StatePart:
    """A part of a run's state that checkpoints have under a key of its own, which is also the name of a file.

    A feature derives a class from this, with a name, and appends what makes it to ``Sockets.parts``. A checkpoint that
    has a part without its feature can be resumed from nevertheless: the part is left out, with a warning.

    Attributes:
        name: what the part is called in messages.
    """

    name: str

    @property
    def key(self) -> str:
        """The key of the part in a checkpoint."""
        return f"{FEATURE}{self.name}"

    def collect(self) -> Any:
        """Return the state to save; None if there is nothing to save. Collective; rank 0's result is used."""
        raise NotImplementedError

    def check(self, outline: Any, *, force: bool) -> None:
        """Raise CheckpointError if a saved state does not fit this run, given its outline. Nothing is loaded yet.

        Args:
            outline: the saved state with the forms of tensors in place of the tensors.
            force: whether to load what can be loaded of a state that does not fit.
        """

    def in_order(self, saved: Any, optimizer: str, order: list[int]) -> Any:
        """Return a saved state, or its outline, with the parameters of an optimizer in the order of this run.

        Args:
            saved: the state.
            optimizer: the name of an optimizer whose parameters had another order when they were saved.
            order: the number that each of its parameters had.
        """
        return saved

    def load(self, saved: SentState) -> None:
        """Load a saved state. Collective."""
        raise NotImplementedError


MakePart = Callable[[Mapping[str, Any]], StatePart | None]
"""Makes a part of a checkpoint from the checkpoint's objects by name (modules as they were before ``prepare``).

It returns None if the checkpoint has nothing that the part is of.
"""


class Stateful(Protocol):
    """An object with a small state of plain values, the same on all ranks. The state is saved with that of the run."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state."""


class States:
    """The small states of a run, by name.

    Attributes:
        waiting: states that were loaded, and whose objects were not added yet.
        objects: the objects by name.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, dict[str, Any]] = {}
        self.objects: dict[str, Stateful] = {}

    def add(self, name: str, stateful: Stateful) -> None:
        """Save and load the state of an object from now on. If a state of its name waits for it, load that now.

        Args:
            name: unique among the objects of a run, and the same in every run that resumes its checkpoints.
            stateful: the object, the same on all ranks.

        Raises:
            UsageError: there is another object of this name.
        """
        if name in self.objects:
            raise UsageError(f"there is a feature {name!r} already: give each a name of its own.")
        self.objects[name] = stateful
        # A script may resume before it adds the object.
        if name in self.waiting:
            stateful.load_state_dict(self.waiting.pop(name))

    def collect(self) -> dict[str, dict[str, Any]]:
        """Return the states by name, and the loaded states that no object has taken yet: the next run may take them."""
        # The next run may add the objects that this one does not have.
        return {**self.waiting, **{name: stateful.state_dict() for name, stateful in self.objects.items()}}

    def load(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Load states. Those of objects that are added later wait for them."""
        self.waiting = {name: state for name, state in states.items() if name not in self.objects}
        for name, stateful in self.objects.items():
            if name in states:
                stateful.load_state_dict(states[name])
