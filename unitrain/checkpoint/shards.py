"""State of which each rank has shards: gathered on rank 0, or written by all ranks, each its own to a file.

In the files of the objects, a tensor on the meta device then stands for each tensor that is sharded. The file of a rank
has the shards of all objects, in the order in which their tensors are found in the objects' states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unitrain.checkpoint.mapped import MappedFiles
from unitrain.communicator import Communicator
from unitrain.data.structure import rebuilt
from unitrain.training.streaming import Keys, RowBlocks, leaves

PREFIX = "_shards-"
"""What the names of the files with shards begin with."""


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

    return rebuilt(state, full)


def separate(communicator: Communicator, parts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[Tensor]]]:
    """Return the states of objects with meta tensors in place of shards, and this rank's shards, by name."""
    own: dict[str, list[Tensor]] = {name: [] for name in parts}

    def without(shards: list[Tensor], value: Any) -> Any:
        if not communicator.is_sharded(value):
            return value
        shards.append(communicator.to_local(value))
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    return {name: rebuilt(state, partial(without, own[name])) for name, state in parts.items()}, own


def join(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of objects with the blocks of all ranks in place of meta tensors, given all parts."""
    files = [parts[name] for name in sorted(parts) if name.startswith(PREFIX)]
    if not files:
        return dict(parts)

    def blocks(name: str) -> Iterator[RowBlocks]:
        yield from map(RowBlocks, zip(*(file.get(name, []) for file in files), strict=True))

    def with_blocks(found: Iterator[RowBlocks], value: Any) -> Any:
        return next(found) if isinstance(value, Tensor) and value.is_meta else value

    objects = {name: state for name, state in parts.items() if not name.startswith(PREFIX)}
    return {name: rebuilt(state, partial(with_blocks, blocks(name))) for name, state in objects.items()}


def paths(parts: Mapping[str, Any]) -> dict[str, list[Keys]]:
    """Return where the tensors are, in the states of joined parts, of which several ranks have written blocks."""
    return {
        name: [path for path, value in leaves(state) if isinstance(value, RowBlocks)] for name, state in parts.items()
    }


def read(
    written_by_ranks: Sequence[Path], places: Mapping[str, Sequence[Keys]], files: MappedFiles
) -> dict[str, dict[Keys, RowBlocks]]:
    """Return the blocks in the files of all ranks, by objects and ``paths``; they are read when they are used."""
    written = [files.load(path) for path in written_by_ranks]
    return {
        name: dict(zip(found, map(RowBlocks, zip(*(file[name] for file in written), strict=True)), strict=True))
        for name, found in places.items()
        if found
    }


def whole(state: Any) -> Any:
    """Return nested state with one tensor in place of the blocks of each."""
    return rebuilt(state, lambda value: torch.cat(list(value.blocks)) if isinstance(value, RowBlocks) else value)
