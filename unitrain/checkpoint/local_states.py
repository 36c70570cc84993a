"""What ranks don't share between the rounds of ``local_steps``: each has an optimizer state of its own.

A checkpoint has rank 0's beside its weights. This is the rest: the states of the outer optimizer, and of the other
ranks' optimizers.
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
    own = optimizer.state_dict()
    ranks = range(1, communicator.world_size)
    return [local.state_dict(optimizer), *(of_rank(communicator, rank, own) for rank in ranks)]


def check(saved: list[Any] | None, world_size: int, *, force: bool) -> None:
    """Raise CheckpointError if saved states, given their outlines, come from another number of ranks."""
    if saved is not None and len(saved) != world_size and not force:
        raise CheckpointError(
            f"with local_steps, each rank has an optimizer state of its own, and the checkpoint has those of "
            f"{len(saved)} ranks, not of {world_size}: resume with {len(saved)} processes, or with resume(force=True), "
            "which gives all ranks rank 0's. Nothing was loaded."
        )


def load(communicator: Communicator, local: LocalSGD, optimizer: Optimizer, expected: list[Any], source: Any) -> None:
    """Load what ``gather`` has returned. Collective. ``expected`` is its outline, and ``source`` itself, on rank 0."""
    mine = {0, communicator.rank} if len(expected) == communicator.world_size else {0}
    saved = receive(communicator, expected, source, new=needed(lambda path: path[0] in mine))
    local.load_state_dict(saved[0], optimizer)
    if communicator.rank in mine - {0}:
        optimizer.load_state_dict(saved[communicator.rank])
