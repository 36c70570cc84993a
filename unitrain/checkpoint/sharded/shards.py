"""State of which each rank has shards: gathered on rank 0, or written by all ranks, each its own to a file.

In the files of the objects, a tensor on the meta device then stands for each tensor that is sharded. The file of a rank
has the shards of all objects, in the order in which their tensors are found in the objects' states.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unitrain.communication.communicator import Communicator
from unitrain.communication.owned import OwnedBy
from unitrain.communication.row_shards import RowShard
from unitrain.communication.streaming import Form, Keys, RowBlocks, leaves
from unitrain.data.structure import rebuilt, tensors

PREFIX = "_shards-"
"""What the names of the files with shards begin with."""

Content = Mapping[str, Sequence[Tensor | int]]
"""What a file with shards has of each object; the number of rows in place of a tensor that this process has not."""


def file_name(rank: int) -> str:
    """Return the name of the file with a rank's shards, without ending."""
    return f"{PREFIX}{rank:05d}"


def gather_shards(communicator: Communicator, state: Any) -> Any:
    """Return nested state with the full tensors on the CPU in place of shards, on rank 0; others get None. Collective.

    On the other ranks at most one tensor is whole at a time.
    """

    def full(value: Any) -> Any:
        if not communicator.is_sharded(value):
            return value
        whole = communicator.full_tensor(value)
        return whole.cpu() if communicator.is_main else None

    return rebuilt(as_row_shards(communicator, state), full)


def as_row_shards(communicator: Communicator, state: Any) -> Any:
    """Return nested state with a row shard in place of each tensor of a sharded optimizer's state. Collective.

    The rank that has the tensor has all of its rows. What is no tensor, or has no dimension, all ranks have.
    """
    if not communicator.owners:
        return state
    others = {path: value.rank for path, value in leaves(state) if isinstance(value, OwnedBy)}
    owners = {path: rank for found in communicator.all_gather_object(others) for path, rank in found.items()}
    own = {path: value for path, rank in owners.items() if rank == communicator.rank for value in _at(state, path)}
    entries: dict[Keys, dict[Any, Any]] = {path[:-1]: {} for path in owners}
    outlines = {path: rebuilt(value, _outlined) for path, value in own.items()}
    for owner, found in enumerate(communicator.all_gather_object(outlines)):
        for path, value in found.items():
            local = (tensor for tensor in tensors(own.get(path)) if tensor.dim())
            entries[path[:-1]][path[-1]] = rebuilt(value, partial(_with_rows, communicator, local, owner))

    def replaced(value: Any, path: Keys) -> Any:
        if path in entries:
            rest = {key: item for key, item in value.items() if (*path, key) not in owners}
            return {**rest, **dict(sorted(entries[path].items()))}
        if isinstance(value, dict):
            made = copy.copy(value)
            made.update((key, replaced(item, (*path, key))) for key, item in value.items())
            return made
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return type(value)(replaced(item, (*path, i)) for i, item in enumerate(value))
        return value

    return replaced(state, ())


def _at(state: Any, path: Keys) -> Iterator[Any]:
    """Yield what is at a path, if anything is."""
    for key in path:
        if isinstance(state, dict) and key not in state:
            return
        state = state[key]
    yield state


def _outlined(value: Any) -> Any:
    return Form(value) if isinstance(value, Tensor) and value.dim() else value


def _with_rows(communicator: Communicator, local: Iterator[Tensor], owner: int, value: Any) -> Any:
    if not isinstance(value, Form):
        return value
    return RowShard.owned(next(local, None), value.shape, value.dtype, owner, communicator)


def separate(communicator: Communicator, parts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[Tensor]]]:
    """Return the states of objects with meta tensors in place of shards, and this rank's shards. Collective."""
    own: dict[str, list[Tensor]] = {name: [] for name in parts}

    def without(shards: list[Tensor], value: Any) -> Any:
        if not communicator.is_sharded(value):
            return value
        shards.append(communicator.to_local(value))
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    whole = as_row_shards(communicator, parts)
    return {name: rebuilt(state, partial(without, own[name])) for name, state in whole.items()}, own


def join(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of objects with the blocks of all ranks in place of meta tensors, given all parts."""
    files: list[Content] = [parts[name] for name in sorted(parts) if name.startswith(PREFIX)]
    if not files:
        return dict(parts)

    def with_blocks(found: Iterator[Sequence[Tensor | int]], value: Any) -> Any:
        return _blocks(next(found), Form(value)) if isinstance(value, Tensor) and value.is_meta else value

    objects = {name: state for name, state in parts.items() if not name.startswith(PREFIX)}
    return {name: rebuilt(state, partial(with_blocks, _by_tensor(files, name))) for name, state in objects.items()}


def _by_tensor(files: Collection[Content], name: str) -> Iterator[Sequence[Tensor | int]]:
    yield from zip(*(file.get(name, []) for file in files), strict=True)


def _blocks(found: Sequence[Tensor | int], form: Form) -> RowBlocks:
    """Return blocks; those that are not here are on the meta device."""
    return RowBlocks(
        [
            one if isinstance(one, Tensor) else torch.empty((one, *form.shape[1:]), dtype=form.dtype, device="meta")
            for one in found
        ]
    )


def lengths(content: Content) -> dict[str, list[int]]:
    """Return the number of rows of each tensor in a file."""
    return {name: [one if isinstance(one, int) else len(one) for one in blocks] for name, blocks in content.items()}


def paths(parts: Mapping[str, Any]) -> dict[str, list[Keys]]:
    """Return where the tensors are, in the states of joined parts, of which several ranks have written blocks."""
    found = {
        name: [path for path, value in leaves(state) if isinstance(value, RowBlocks)] for name, state in parts.items()
    }
    return {name: places for name, places in found.items() if places}


def blocks_at(
    places: Mapping[str, Sequence[Keys]], outlines: Mapping[str, Any], files: Collection[Content]
) -> dict[str, dict[Keys, RowBlocks]]:
    """Return the blocks in the files of all ranks, by objects and ``paths``.

    Args:
        places: the paths, in the order of the tensors in the files.
        outlines: the outlines of the objects' states.
        files: their contents.
    """
    held: dict[str, dict[Keys, RowBlocks]] = {}
    for name, its in places.items():
        forms = dict(leaves(outlines[name]))
        held[name] = {
            path: _blocks(found, forms[path]) for path, found in zip(its, _by_tensor(files, name), strict=True)
        }
    return held


def put_blocks(parts: Mapping[str, Any], held: Mapping[str, Mapping[Keys, RowBlocks]]) -> None:
    """Put blocks into the states of joined parts, some of which may have had none in memory."""
    for name, its in held.items():
        for path, value in leaves(parts[name]):
            if path in its:
                value.blocks = its[path].blocks


def whole(state: Any) -> Any:
    """Return nested state with one tensor in place of the blocks of each."""
    return rebuilt(state, lambda value: torch.cat(list(value.blocks)) if isinstance(value, RowBlocks) else value)
