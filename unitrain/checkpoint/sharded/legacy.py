"""Reads sharded checkpoints of UniTrain before it wrote them in torch's own format: rank 0 reads all and sends it.

A tensor on the meta device stood for each sharded tensor in the states of the objects. The file of a rank had its rows
of the tensors of all objects, in the order in which the tensors are found in the objects' states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from unitrain.checkpoint.names import LEGACY
from unitrain.checkpoint.sharded.parts import Region
from unitrain.checkpoint.sharded.saving import PIECE_BYTES
from unitrain.checkpoint.sharded.stored import Stored
from unitrain.communication.streaming import Form
from unitrain.data.structure import rebuilt


def join(parts: Mapping[str, Any]) -> tuple[dict[str, Any], Stored | None]:
    """Return the states of objects with forms in place of sharded tensors, and the tensors, given all files' contents.

    Raises:
        Exception: the files do not fit together.
    """
    files = [parts[name] for name in sorted(parts) if name.startswith(LEGACY)]
    objects = {name: state for name, state in parts.items() if not name.startswith(LEGACY)}
    if not files:
        return objects, None
    metadata, blocks = Metadata({}, storage_data={}), {}
    for name, state in objects.items():
        several = zip(*(file.get(name, []) for file in files), strict=True)

        def form(value: Any, name: str = name, several: Any = several) -> Any:
            if not (isinstance(value, Tensor) and value.is_meta):
                return value
            key = f"{name}:{len(metadata.state_dict_metadata)}"
            pieces = [piece for block in next(several) for piece in _pieces(block)]
            regions, first = [], 0
            for piece in pieces:
                regions.append(Region.rows(first, piece))
                blocks[MetadataIndex(key, regions[-1].offsets)] = piece
                first += len(piece)
            if first != len(value):
                raise ValueError(f"{name} has {first} rows of a tensor of {len(value)}")
            chunks = [ChunkStorageMetadata(*region) for region in regions]
            properties = TensorProperties(value.dtype)
            metadata.state_dict_metadata[key] = TensorStorageMetadata(properties, value.shape, chunks)
            return Form(value, key)

        objects[name] = rebuilt(state, form)
    return objects, Stored(metadata, _Blocks(blocks))


def _pieces(block: Tensor) -> tuple[Tensor, ...]:
    return torch.split(block, max(1, PIECE_BYTES * len(block) // max(1, block.nbytes))) if len(block) else ()


class _Blocks(FileSystemReader):
    """Reads tensors that are mapped."""

    def __init__(self, blocks: Mapping[MetadataIndex, Tensor]) -> None:
        super().__init__(".")
        self._blocks = blocks

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy parts of the tensors."""
        for item in plan.items:
            source = self._blocks[item.storage_index]
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dim, offset, length)
            planner.resolve_tensor(item).copy_(source)
        done: Future[None] = Future()
        done.set_result(None)
        return done
