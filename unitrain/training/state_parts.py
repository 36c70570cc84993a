"""What features and scripts add to a checkpoint: state in files of its own, and small states beside that of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch.optim import Optimizer


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
