"""``unitrain checkpoint``: shows what is in a checkpoint, and writes the whole weights of a model to one file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import torch
from torch import Tensor

from unitrain.checkpoint.sharded import saved, shards
from unitrain.checkpoint.store.folder import NotACheckpointError, Saved
from unitrain.checkpoint.store.local import checkpoint_in
from unitrain.checkpoint.store.manifest import DamagedError
from unitrain.checkpoint.weights.safetensors import DTYPES
from unitrain.communication.streaming import Form, RowBlocks
from unitrain.errors import CheckpointError, UsageError

_SAFETENSORS = {dtype: name for name, dtype in DTYPES.items()}


def inspect(path: Path) -> Iterator[str]:
    """Verify a checkpoint, and yield lines that say what is in it.

    Args:
        path: its folder, or that of checkpoints, whose newest is taken.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    opened = open_checkpoint(path)
    size = sum(file.size for file in opened.manifest.files.values())
    yield f"step {opened.manifest.step}, {len(opened.manifest.files)} files, {size} bytes, intact"
    for name, state in opened.parts.items():
        found = list(tensors_of(state))
        yield f"{name}: {len(found)} tensors, {sum(torch.Size(form.shape).numel() for _, form, _ in found)} elements"
        for key, form, parts in found:
            dtype = str(form.dtype).removeprefix("torch.")
            yield f"  {key} {form.shape} {dtype}{f', in {parts} parts' if parts > 1 else ''}"


def merge(path: Path, output: Path, name: str = "model") -> None:
    """Write the state of one object of a checkpoint to a file, with whole tensors.

    Args:
        path: the checkpoint's folder, or that of checkpoints, whose newest is taken.
        output: the file. One that ends in ``.safetensors`` is written in that format, a block of a tensor at a time,
            and any other one by ``torch.save``.
        name: of the object.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or the file can't be written.
        UsageError: it has no such object, or the object has more than tensors, which safetensors can't hold.
    """
    opened = open_checkpoint(path)
    objects = [key for key in opened.parts if not key.startswith("_")]
    if name not in objects:
        raise UsageError(f"the checkpoint has no {name!r}. It has {', '.join(objects)}: name one with --object.")
    temporary = output.with_name(f".{output.name}.{uuid4().hex}.tmp")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            if output.suffix == ".safetensors":
                _write_safetensors(file, name, opened.parts[name])
            else:
                torch.save(shards.whole(opened.parts[name]), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, output)
    except OSError as error:
        raise CheckpointError(f"{output} could not be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def open_checkpoint(path: Path) -> Saved:
    """Verify and open a checkpoint.

    Args:
        path: its folder, or that of checkpoints, whose newest is taken.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    try:
        return checkpoint_in(path)
    except DamagedError as error:
        raise CheckpointError(f"the checkpoint is damaged: {error}") from error
    except NotACheckpointError as error:
        found = saved.wanted(None, saved.folder_at(path)) if path.is_dir() else None
        if found is None:
            raise CheckpointError(f"{path} {error}, so there is nothing to read.") from None
        return found


def tensors_of(state: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Form, int]]:
    """Yield the key, the form and the number of parts of each tensor in nested state."""
    if isinstance(state, RowBlocks):
        yield ".".join(path), state.form, len(state.blocks)
    elif isinstance(state, Tensor):
        yield ".".join(path), Form(state), 1
    elif isinstance(state, (dict, list, tuple)):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from tensors_of(value, (*path, str(key)))


def _write_safetensors(file: BinaryIO, name: str, state: Mapping[str, Any]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, value in state.items():
        form = value.form if isinstance(value, RowBlocks) else Form(value) if isinstance(value, Tensor) else None
        if form is None or form.dtype not in _SAFETENSORS:
            kind = type(value).__name__ if form is None else str(form.dtype)
            raise UsageError(f"{key} of {name} is {kind}, which safetensors can't hold: merge into a .pt file.")
        start, end = end, end + torch.Size(form.shape).numel() * form.dtype.itemsize
        header[key] = {"dtype": _SAFETENSORS[form.dtype], "shape": list(form.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for value in state.values():
        for block in value.blocks if isinstance(value, RowBlocks) else [value]:
            file.write(block.contiguous().reshape(-1).view(torch.uint8).numpy().data)
