"""``unitrain checkpoint``: shows what is in a checkpoint, and writes the whole weights of a model to one file."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import torch
from torch import Tensor

from unitrain.checkpoint.sharded import saved, shards
from unitrain.checkpoint.sharded.saved import Saved
from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.folder import Folder
from unitrain.checkpoint.store.located import NotACheckpointError, checkpoint_at
from unitrain.checkpoint.store.manifest import DamagedError
from unitrain.checkpoint.weights.safetensors import DTYPES
from unitrain.commands.arguments import path, sentence
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
        return saved.opened(checkpoint_at(path))
    except DamagedError as error:
        raise CheckpointError(f"the checkpoint is damaged: {error}") from error
    except NotACheckpointError as error:
        found = saved.wanted(None, Folder(Disk(path))) if path.is_dir() else None
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    where = "folder of a checkpoint, or of checkpoints, whose newest is taken"
    summary = "verify a checkpoint, and list its tensors"
    inspect = actions.add_parser("inspect", help=summary, description=sentence(summary))
    inspect.add_argument("path", type=path, metavar="PATH", help=where)
    inspect.set_defaults(run=_run_inspect)
    summary = "write the state of one object to a file, with whole tensors"
    merge = actions.add_parser("merge", help=summary, description=sentence(summary))
    merge.add_argument("path", type=path, metavar="PATH", help=where)
    merge.add_argument(
        "-o", "--output", type=path, metavar="FILE", required=True, help="a .safetensors file, or one for torch.load"
    )
    merge.add_argument("--object", default="model", metavar="NAME", help="name of the object (default: %(default)s)")
    merge.set_defaults(run=_run_merge)
    summary = "write weights and optimizer state in the layout of torch.distributed.checkpoint, for dcp.load"
    export = actions.add_parser("export", help=summary, description=sentence(summary))
    export.add_argument("path", type=path, metavar="PATH", help=where)
    export.add_argument("-o", "--output", type=path, metavar="DIR", required=True, help="a new folder")
    export.add_argument(
        "--object",
        action="append",
        type=_prefixed,
        metavar="NAME[=PREFIX]",
        help="an object, and what its keys begin with (default: all objects with tensors, by their names)",
    )
    export.add_argument("--flatten-optimizer", action="store_true", help="options by parameter, as torchtitan has them")
    export.set_defaults(run=_run_export)
    summary = "write what dcp.save of torch.distributed.checkpoint has written as a checkpoint to resume from"
    importing = actions.add_parser("import", help=summary, description=sentence(summary))
    importing.add_argument("path", type=path, metavar="DIR", help="the folder that dcp.save was given")
    importing.add_argument(
        "-o", "--output", type=path, metavar="FOLDER", required=True, help="folder of checkpoints; step-N is added"
    )
    importing.add_argument("--step", type=int, default=0, metavar="N", help="steps made so far (default: %(default)s)")
    importing.add_argument(
        "--object",
        action="append",
        type=_prefixed,
        metavar="NAME[=PREFIX]",
        help="an object, and what its keys begin with (default: model and optimizer)",
    )
    importing.set_defaults(run=_run_import)


def _prefixed(text: str) -> tuple[str, str]:
    """Return the name of an object, and the prefix of its keys, which is the name by default."""
    name, equals, prefix = text.partition("=")
    if not name or "/" in name or name.startswith("_"):
        raise argparse.ArgumentTypeError(f"{text!r} must be the name of an object, or NAME=PREFIX")
    return name, prefix if equals else name


def _run_inspect(arguments: argparse.Namespace) -> int:
    for line in inspect(arguments.path):
        print(line)
    return 0


def _run_merge(arguments: argparse.Namespace) -> int:
    merge(arguments.path, arguments.output, arguments.object)
    print(f"written: {arguments.output}")
    return 0


def _run_export(arguments: argparse.Namespace) -> int:
    from unitrain.commands.dcp import export

    prefixes = dict(arguments.object or ())
    for line in export(arguments.path, arguments.output, prefixes, flatten_optimizer=arguments.flatten_optimizer):
        print(line)
    return 0


def _run_import(arguments: argparse.Namespace) -> int:
    from unitrain.commands.dcp import import_

    for line in import_(arguments.path, arguments.output, dict(arguments.object or ()), arguments.step):
        print(line)
    return 0
