"""What features and scripts add to a checkpoint: state in files of its own, and small states beside that of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch.optim import Optimizer

from unitrain.errors import UsageError


class StatePart:
    """State that checkpoints have in a file of its own, beside those of the run's objects.

    Attributes:
        name: of the file. It begins with ``store.located.FEATURE``, as no name of an object does.
    """

    name: str

    def collect(self, optimizers: Mapping[str, Optimizer]) -> Any:
        """Return the state to save; None for no file. Collective; rank 0's result is used."""
        raise NotImplementedError

    def check(self, saved: Any, *, force: bool) -> None:
        """Raise CheckpointError if a saved state does not fit this run, given its outline. Nothing is loaded yet."""

    def load(self, optimizers: Mapping[str, Optimizer], expected: Any, source: Any) -> None:
        """Load a saved state. Collective.

        Args:
            optimizers: of the run, by name.
            expected: the outline of the state.
            source: the state itself, on rank 0.
        """
        raise NotImplementedError

    def in_order(self, saved: Any, order: Any) -> Any:
        """Return a saved state with the parameters of optimizers in another order."""
        return saved


class Stateful(Protocol):
    """An object with a small state of plain values, the same on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state."""


class States:
    """The small states of a run, by name."""

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}
        self._waiting: dict[str, dict[str, Any]] = {}  # loaded before their objects were added

    def add(self, name: str, stateful: Stateful) -> None:
        """Save and load the state of an object from now on. What was loaded before under its name is loaded now.

        Raises:
            UsageError: there is another object of this name.
        """
        if name in self._objects:
            raise UsageError(f"there is a feature {name!r} already: give each a name of its own.")
        self._objects[name] = stateful
        if name in self._waiting:
            stateful.load_state_dict(self._waiting.pop(name))

    def collect(self) -> dict[str, dict[str, Any]]:
        """Return the states by name, with those that no object has taken yet."""
        return {**self._waiting, **{name: stateful.state_dict() for name, stateful in self._objects.items()}}

    def load(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Load states. Those of objects that are added later wait for them."""
        self._waiting = {name: state for name, state in states.items() if name not in self._objects}
        for name, stateful in self._objects.items():
            if name in states:
                stateful.load_state_dict(states[name])
