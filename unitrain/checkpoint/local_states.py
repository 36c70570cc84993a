"""What ranks don't share with ``local_steps``: each has its own optimizer state, and within a round its own weights.

A checkpoint has the shared weights, and rank 0's optimizer state beside them. This is the rest: the states of the outer
optimizer, and of the other ranks' optimizers, with the own weights of each rank.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from unitrain.checkpoint.sharded.saving import of_rank
from unitrain.communication.communicator import Communicator
from unitrain.communication.streaming import needed, receive
from unitrain.errors import CheckpointError
from unitrain.training.optimizers.local_sgd import LocalSGD


def gather(communicator: Communicator, local: LocalSGD, optimizer: Optimizer) -> list[Any]:
    """Return the states of the outer optimizer, and of the other ranks' optimizers. Collective.

    Only rank 0's result can be used, which has the states of all ranks in its memory.
    """
    first, own = (local.with_own(one, optimizer) for one in (local.state_dict(optimizer), optimizer.state_dict()))
    ranks = range(1, communicator.world_size)
    return [first, *(of_rank(communicator, rank, own) for rank in ranks)]


def check(saved: list[Any] | None, world_size: int, *, force: bool) -> None:
    """Raise CheckpointError if saved states, given their outlines, come from another number of ranks."""
    if saved is not None and len(saved) != world_size and not force:
        raise CheckpointError(
            f"with local_steps, each rank has an optimizer state of its own, and the checkpoint has those of "
            f"{len(saved)} ranks, not of {world_size}: resume with {len(saved)} processes, or with resume(force=True), "
            "which gives all ranks rank 0's, and the weights that they share. Nothing was loaded."
        )


def load(communicator: Communicator, local: LocalSGD, optimizer: Optimizer, expected: list[Any], source: Any) -> None:
    """Load what ``gather`` has returned. Collective. ``expected`` is its outline, and ``source`` itself, on rank 0."""
    fits = len(expected) == communicator.world_size
    mine = {0, communicator.rank} if fits else {0}
    saved = receive(communicator, expected, source, new=needed(lambda path: path[0] in mine))
    local.load_state_dict(saved[0], saved[communicator.rank] if fits else {"state": {}}, optimizer)
    if communicator.rank in mine - {0}:
        optimizer.load_state_dict(saved[communicator.rank])
