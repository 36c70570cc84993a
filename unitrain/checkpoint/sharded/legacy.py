"""Reads sharded checkpoints of UniTrain before it wrote them in torch's own format: rank 0 reads all and sends it.

A tensor on the meta device stood for each sharded tensor in the states of the objects. The file of a rank had its rows
of the tensors of all objects, in the order in which the tensors are found in the objects' states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unitrain.checkpoint.names import LEGACY
from unitrain.checkpoint.sharded.dcp import PIECE_BYTES, Entry, Layout, Piece, Region, Stored
from unitrain.communication.streaming import Form
from unitrain.data.structure import rebuilt


def join(parts: Mapping[str, Any]) -> tuple[dict[str, Any], Stored | None]:
    """Return the states of objects with forms in place of sharded tensors, and the tensors, given all files' contents.

    Raises any exception if the files do not fit together.
    """
    files = [parts[name] for name in sorted(parts) if name.startswith(LEGACY)]
    objects = {name: state for name, state in parts.items() if not name.startswith(LEGACY)}
    if not files:
        return objects, None
    layout: Layout = {}
    blocks: list[Tensor] = []
    for name, state in objects.items():
        several = zip(*(file.get(name, []) for file in files), strict=True)

        def form(value: Any, name: str = name, several: Any = several) -> Any:
            if not (isinstance(value, Tensor) and value.is_meta):
                return value
            key, pieces, first = f"{name}:{len(layout)}", [], 0
            for rows in (piece for block in next(several) for piece in _pieces(block)):
                pieces.append(Piece(Region.rows(first, rows), "", len(blocks), 0))
                blocks.append(rows)
                first += len(rows)
            if first != len(value):
                raise ValueError(f"{name} has {first} rows of a tensor of {len(value)}")
            layout[key] = Entry((name,), str(value.dtype).removeprefix("torch."), tuple(value.shape), pieces)
            return Form(value, key)

        objects[name] = rebuilt(state, form)
    return objects, Stored(layout, lambda entry, piece: blocks[piece.start])


def _pieces(block: Tensor) -> tuple[Tensor, ...]:
    return torch.split(block, max(1, PIECE_BYTES * len(block) // max(1, block.nbytes))) if len(block) else ()
