"""What ranks don't share with ``local_sgd``: each has its own optimizer state, and within a round its own weights.

A checkpoint has the shared weights, and rank 0's optimizer state beside them. This is the rest: the states of the outer
optimizer, and of the other ranks' optimizers, with the own weights of each rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch.optim import Optimizer

from unitrain.checkpoint.names import in_order
from unitrain.checkpoint.sharded.saving import of_rank
from unitrain.communication.communicator import Communicator
from unitrain.communication.state_transfer import needed
from unitrain.errors import CheckpointError
from unitrain.training.state_parts import SavedState, StatePart


class Rounds(Protocol):
    """The rounds of a run, as far as their state is concerned; see ``LocalSGD``."""

    def collect(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the outer optimizer's state."""

    def with_own(self, state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Return a state with this rank's weights, within a round."""

    def restore(self, state: Mapping[str, Any], own: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Load these states."""


class LocalStates(StatePart):
    """The states of the outer optimizer, and of the other ranks' optimizers, in the memory of rank 0."""

    name = "local_sgd"

    def __init__(self, communicator: Communicator, local: Rounds, optimizer: Optimizer) -> None:
        self._ranks = communicator
        self._local = local
        self._optimizer = optimizer

    @classmethod
    def of(cls, communicator: Communicator, local: Rounds, objects: Mapping[str, Any]) -> LocalStates | None:
        """Return the part of a checkpoint of these objects, if an optimizer is among them."""
        optimizers = [value for value in objects.values() if isinstance(value, Optimizer)]
        return cls(communicator, local, *optimizers) if optimizers else None

    def collect(self) -> list[Any]:
        """Return the states. Collective; only rank 0's result can be used."""
        local, ranks, optimizer = self._local, self._ranks, self._optimizer
        first, own = (local.with_own(one, optimizer) for one in (local.collect(optimizer), optimizer.state_dict()))
        return [first, *(of_rank(ranks, rank, own) for rank in range(1, ranks.world_size))]

    def check(self, outline: list[Any], *, force: bool) -> None:
        """Raise CheckpointError if saved states, given their outlines, come from another number of ranks."""
        if len(outline) != self._ranks.world_size and not force:
            raise CheckpointError(
                f"with local_sgd, each rank has an optimizer state of its own, and the checkpoint has those of "
                f"{len(outline)} ranks, not of {self._ranks.world_size}: resume with {len(outline)} processes, or with "
                "resume(force=True), which gives all ranks rank 0's, and the weights that they share. Nothing was "
                "loaded."
            )

    def in_order(self, saved: list[Any], optimizer: str, order: list[int]) -> list[Any]:
        """Return the states of optimizers with parameters in another order."""
        return [in_order(state, order) for state in saved]

    def load(self, saved: SavedState) -> None:
        """Load what ``collect`` has returned. Collective."""
        ranks, optimizer = self._ranks, self._optimizer
        fits = len(saved.outline) == ranks.world_size
        mine = {0, ranks.rank} if fits else {0}
        states = saved.receive(new=needed(lambda path: path[0] in mine))
        self._local.restore(states[0], states[ranks.rank] if fits else {"state": {}}, optimizer)
        if ranks.rank in mine - {0}:
            optimizer.load_state_dict(states[ranks.rank])
