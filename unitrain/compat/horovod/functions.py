"""Sends the state of models and optimizers, and objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from unitrain.communication.communicator import Communicator
from unitrain.communication.comparison import difference_between_ranks
from unitrain.communication.state_transfer import SentState, broadcast_tensors, outline
from unitrain.compat.horovod.process_sets import HorovodInternalError, ProcessSet, global_process_set

T = TypeVar("T")


def broadcast_parameters(params: dict[str, Tensor] | Iterable[Any], root_rank: int) -> None:
    """Overwrite tensors with a rank's, in place. Collective.

    Args:
        params: a state dict, tensors, or pairs of a name and a tensor.
        root_rank: the rank that has the values.

    Raises:
        HorovodInternalError: the ranks have other tensors; on every rank.
    """
    items = sorted(params.items()) if isinstance(params, dict) else params
    named = [item if isinstance(item, tuple) else (f"number {i}", item) for i, item in enumerate(items)]

    def send(communicator: Communicator) -> None:
        check_same(communicator, "broadcast_parameters", named)
        tensors = [tensor for _, tensor in named]
        broadcast_tensors(communicator, tensors, tensors, src=root_rank)

    global_process_set.call("broadcast_parameters", None, (root_rank,), send)


def check_same(communicator: Communicator, caller: str, named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise HorovodInternalError on all ranks unless they have tensors of the same names and forms. Collective.

    Args:
        communicator: the communicator of this process.
        caller: the function to name.
        named: the tensors, with their names.
    """
    facts = {str(name): f"{str(tensor.dtype)[6:]}{list(tensor.shape)}" for name, tensor in named}
    if differing := difference_between_ranks(communicator, {**facts, "order": list(facts)}):
        raise HorovodInternalError(
            f"{caller}: tensor {differing[0]} is {differing[1]}: all ranks must have the same, in the same order."
        )


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int, model: nn.Module | None = None) -> None:
    """Overwrite the state and the options of an optimizer with a rank's. Collective.

    An optimizer that has no state yet makes a step with gradients of zero before, as with Horovod: such gradients stay,
    Adam has counted a step, and weight decay has changed the weights. If only other ranks than the root have none, it
    makes no such step, and they get the root's state.

    Args:
        optimizer: the optimizer, distributed or not.
        root_rank: the rank that has the state.
        model: has no effect.
    """

    def send(communicator: Communicator) -> None:
        if communicator.broadcast_data(not optimizer.state, root_rank) and not optimizer.state:
            _step_without_gradients(optimizer)
        # Tensors go straight into their places, in small buffers.
        groups, state = optimizer.param_groups, optimizer.state_dict()
        form = communicator.broadcast_object(outline(state), root_rank)
        SentState(communicator, form, state, root_rank).load_into(optimizer)
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            group.update(loaded)
        optimizer.param_groups = groups  # the same dicts: the optimizer that was wrapped, and its scheduler, have them

    global_process_set.call("broadcast_optimizer_state", None, (root_rank,), send)


def _step_without_gradients(optimizer: Optimizer) -> None:
    """Let an optimizer make its state, by a step with gradients of zero. Not collective."""
    for p in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
        zeros = torch.zeros_like(p)
        p.grad = zeros.to_sparse(1) if isinstance(optimizer, SparseAdam) else zeros
    with getattr(optimizer, "skip_synchronize", nullcontext)():
        optimizer.step()


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """Return a rank's object. Collective.

    Args:
        obj: as of ``Communicator.broadcast_object``; ignored on other ranks.
        root_rank: the rank that has it, of all.
        name: matches the calls of the ranks.
        process_set: the ranks that call it.
    """

    def send(communicator: Communicator) -> T:
        return communicator.broadcast_object(obj, process_set.ranks.index(root_rank))

    return process_set.call("broadcast_object", name, (root_rank,), send)


def allgather_object(obj: T, name: str | None = None) -> list[T]:
    """Return the objects of all ranks, in their order. Collective.

    Args:
        obj: as of ``Communicator.all_gather_object``.
        name: matches the calls of the ranks.
    """
    return global_process_set.call("allgather_object", name, (), lambda ranks: ranks.all_gather_object(obj))
