"""Which part of a run's state this rank has: rows of tensors (fsdp), or the whole state of some parameters (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unitrain.checkpoint.names import GROUPS, PARAMS, STATE
from unitrain.communication.communicator import Communicator
from unitrain.communication.streaming import outline, receive
from unitrain.data.structure import rebuilt

_CPU, _META = torch.device("cpu"), torch.device("meta")


class Region(NamedTuple):
    """A part of a tensor."""

    offsets: torch.Size
    sizes: torch.Size

    @classmethod
    def rows(cls, first: int, local: Tensor) -> Region:
        """Return the region of rows of a tensor, from a first one."""
        return cls(torch.Size([first, *[0] * local.dim()][: local.dim()]), local.shape)


def owners(communicator: Communicator, state: Mapping[int, Any], parameters: int) -> list[int | None]:
    """Return which rank has the state of each parameter of an optimizer; None if every rank has it. Collective.

    Args:
        communicator: the communicator of this process.
        state: the optimizer's states by the number of their parameter. One that another rank has is no dict.
        parameters: the number of parameters.
    """
    if not communicator.shards_optimizers:
        return [None] * parameters
    here = torch.tensor([isinstance(state.get(number, {}), dict) for number in range(parameters)])
    rank, world = communicator.rank, communicator.world_size
    bounds = torch.stack([torch.where(here, rank, -1), torch.where(here, -rank, -world)])
    last, first = communicator.all_reduce(bounds, "max").tolist()  # of the ranks that have it; the first is negated
    return [one if one == -other else None for one, other in zip(last, first, strict=True)]


def gathered(communicator: Communicator, state: Any) -> Any:
    """Return nested state with the full tensors on the CPU in place of parts, on rank 0. Collective.

    On the other ranks at most one tensor is whole at a time, and the result can't be used.
    """

    def full(value: Any) -> Any:
        if not communicator.is_sharded(value):
            return value
        whole = communicator.full_tensor(value)
        return whole.cpu() if communicator.is_main else None

    return rebuilt(_with_states(communicator, state), full)


def _with_states(communicator: Communicator, value: Any) -> Any:
    """Return nested state with the states that other ranks have, in the states of optimizers, on rank 0."""
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_with_states(communicator, item) for item in value)
    if not isinstance(value, dict):
        return value
    if not value.keys() >= {STATE, GROUPS}:
        return {key: _with_states(communicator, item) for key, item in value.items()}
    states = dict(value[STATE])
    ranks = owners(communicator, states, sum(len(group[PARAMS]) for group in value[GROUPS]))
    for rank in sorted({one for one in ranks if one is not None}):
        mine = {n: states[n] for n, one in enumerate(ranks) if one == rank and n in states}
        expected = communicator.broadcast_object(outline(mine), rank)
        device = _CPU if communicator.is_main else _META
        states.update(
            receive(communicator, expected, mine, src=rank, own=mine, new=lambda path, form: form.empty(device))  # noqa: B023
        )
    # Of a parameter that no rank has a state of, there is only the rank that would have it.
    return {**value, STATE: {number: its for number, its in states.items() if isinstance(its, dict)}}
