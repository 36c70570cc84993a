"""``unitrain checkpoint``: lists the tensors of a checkpoint, and writes the whole weights of a model to one file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from unitrain import features
from unitrain.checkpoint.sharded.dcp import key_of
from unitrain.checkpoint.sharded.opening import OpenCheckpoint, Search, opened
from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.folder import Folder
from unitrain.checkpoint.store.located import DamagedError, Located, NotACheckpointError, checkpoint_at
from unitrain.commands.arguments import path, sentence
from unitrain.communication.state_transfer import Form, leaves
from unitrain.communication.structure import rebuilt
from unitrain.errors import CheckpointError, UsageError


def inspect(path: Path) -> int:
    """Verify a checkpoint, the newest in a folder of several, and print the keys, shapes and dtypes of its tensors.

    Args:
        path: the folder of a checkpoint, or of checkpoints.

    Returns:
        The exit code, 0.

    Raises:
        CheckpointError: it is damaged or missing.
    """
    saved = open_checkpoint(path)
    size = sum(file.size for file in saved.located.manifest.files.values())
    print(f"step {saved.located.manifest.step}, {len(saved.located.manifest.files)} files, {size} bytes, intact")
    for name, state in saved.parts.items():
        tensors = list(_tensors_of(saved, state))
        elements = sum(torch.Size(form.shape).numel() for _, form, _ in tensors)
        print(f"{name}: {len(tensors)} tensors, {elements} elements")
        for key, form, parts in tensors:
            dtype = str(form.dtype).removeprefix("torch.")
            print(f"  {key} {form.shape} {dtype}{f', in {parts} parts' if parts > 1 else ''}")
    return 0


def merge(path: Path, output: Path, name: str = "model") -> int:
    """Write the state of one object of a checkpoint, the newest in a folder of several, to a file with whole tensors.

    If a feature writes files with its ending, the tensors are written one at a time. Any other is for ``torch.load``.
    """
    saved = open_checkpoint(path)
    # Parts with an underscore are UniTrain's own: generators, positions in the data.
    objects = [key for key in saved.parts if not key.startswith("_")]
    if name not in objects:
        raise UsageError(f"the checkpoint has no {name!r}. It has {', '.join(objects)}: name one with --object.")
    store = Disk(output.parent)
    with store.explained(f"{output} could not be written", UsageError):
        store.make()
        # Written under another name first: a reader never sees half a file.
        with store.draft(output.name) as draft, open(draft, "wb") as file:
            if write := features.declared("WRITERS").get(output.suffix):
                _write(write, file, name, saved)
            else:
                forms = (Tensor, Form)
                whole = rebuilt(saved.parts[name], lambda x: saved.tensor(x) if isinstance(x, forms) else x)
                torch.save(whole, file)
    print(f"written: {output}")
    return 0


def open_checkpoint(path: Path) -> OpenCheckpoint:
    """Verify and open a checkpoint, the newest in a folder of several.

    Raises:
        CheckpointError: it is damaged or missing.
    """
    try:
        return _verified(checkpoint_at(path))
    except DamagedError as error:
        raise CheckpointError(f"the checkpoint is damaged: {error}") from error
    except NotACheckpointError as error:
        newest = Search(Folder(Disk(path))).next(_verified) if path.is_dir() else None
        if newest is None:
            raise CheckpointError(f"{path} {error}, so there is nothing to read.") from None
        return newest


def _verified(located: Located) -> OpenCheckpoint:
    """Open a checkpoint, and read the files of its shards to compare their digests."""
    saved = opened(located)
    # Files for torch.load were verified when they were read.
    if saved.stored is not None:
        saved.stored.fetch(name for name in located.manifest.files if not name.endswith(".pt"))
    return saved


def _tensors_of(saved: OpenCheckpoint, state: Any) -> Iterator[tuple[str, Form, int]]:
    """Yield the key, the form and the number of parts of each tensor in nested state."""
    for keys, value in leaves(state):
        if isinstance(value, Form):
            forms: dict[Any, Any] = {} if saved.stored is None else saved.stored.metadata.state_dict_metadata
            parts = len(forms[value.key].chunks) if value.key in forms else 1
            yield key_of(keys), value, parts
        elif isinstance(value, Tensor):
            yield key_of(keys), Form(value), 1


def _write(write: Callable[..., None], file: BinaryIO, name: str, saved: OpenCheckpoint) -> None:
    """Write the state of an object, whose values are all tensors, to a file of another format."""
    state = saved.parts[name]
    for key, value in state.items():
        if not isinstance(value, (Tensor, Form)):
            raise UsageError(f"{key} of {name} is {type(value).__name__}, and no tensor: merge into a .pt file.")
    write(file, state, map(saved.tensor, state.values()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    where = "folder of a checkpoint, or of checkpoints: the newest is taken"
    summary = "verify a checkpoint, and list its tensors"
    action = actions.add_parser("inspect", help=summary, description=sentence(summary))
    action.add_argument("path", type=path, metavar="PATH", help=where)
    action.set_defaults(run=inspect)
    endings = "".join(f", or a {ending} file" for ending in features.declared("WRITERS"))
    output = f"a file for torch.load{endings}"
    summary = "write the state of one object to a file, with whole tensors"
    action = actions.add_parser("merge", help=summary, description=sentence(summary))
    action.add_argument("path", type=path, metavar="PATH", help=where)
    action.add_argument("-o", "--output", type=path, metavar="FILE", required=True, help=output)
    action.add_argument(
        "--object", dest="name", default="model", metavar="NAME", help="name of the object (default: %(default)s)"
    )
    action.set_defaults(run=merge)
