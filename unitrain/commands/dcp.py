"""``unitrain checkpoint export`` and ``import``: to and from checkpoints of torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from unitrain.checkpoint.sharded import dcp
from unitrain.checkpoint.sharded.dcp_optimizer import GROUPS, STATE, flattened, named, numbered
from unitrain.checkpoint.sharded.saved import Saved
from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.folder import Folder
from unitrain.checkpoint.store.manifest import RUN
from unitrain.commands.checkpoint import open_checkpoint, tensors_of
from unitrain.errors import CheckpointError, UsageError

Prefixes = Mapping[str, str]
"""The names of objects, and what their keys in DCP's checkpoint begin with."""


def export(path: Path, output: Path, prefixes: Prefixes, *, flatten_optimizer: bool) -> Iterator[str]:
    """Write objects of a checkpoint in DCP's layout, and yield lines that say what was written.

    Args:
        path: the checkpoint's folder, or that of checkpoints, whose newest is taken.
        output: the folder that ``dcp.load`` is to be given, which must not exist.
        prefixes: the objects; if empty, all that have tensors, and their names.
        flatten_optimizer: write optimizers' states as ``get_optimizer_state_dict`` returns them with
            ``flatten_optimizer_state_dict``.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or the folder can't be written.
        UsageError: there is no such object, or the names of an optimizer's parameters are unknown.
    """
    if os.path.lexists(output):
        raise UsageError(f"{output} exists: name a new folder.")
    opened = open_checkpoint(path)
    objects = {name: state for name, state in opened.parts.items() if not name.startswith("_")}
    chosen = prefixes or {name: name for name, state in objects.items() if any(tensors_of(state))}
    missing = [name for name in chosen if name not in objects]
    if missing:
        raise UsageError(f"the checkpoint has no {missing[0]!r}. It has {', '.join(objects)}.")
    root: dict[str, Any] = {}
    for name, prefix in chosen.items():
        state = objects[name]
        if _is_optimizer(state):
            state = named(state, _names(opened, name, chosen))
            state = flattened(state) if flatten_optimizer else state
        within = root
        for part in prefix.split(".") if prefix else ():
            within = within.setdefault(part, {})
        within.update(state)
    temporary = output.with_name(f".{output.name}.{uuid4().hex}.tmp")
    try:
        dcp.write(root, temporary)
        os.rename(temporary, output)
    except OSError as error:
        raise CheckpointError(f"{output} could not be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for name, prefix in chosen.items():
        yield f"{name}: {sum(1 for _ in tensors_of(objects[name]))} tensors, as {f'{prefix}.' if prefix else ''}..."
    left = [name for name in objects if name not in chosen]
    yield f"left out: {', '.join([*left, 'random number generators'])}"


def import_(path: Path, output: Path, prefixes: Prefixes, step: int) -> Iterator[str]:
    """Write objects of DCP's checkpoint as one of ours, and yield lines that say what was written.

    Args:
        path: the folder of DCP's checkpoint.
        output: the folder of checkpoints, in which ``step-N`` is written.
        prefixes: the objects; if empty, ``model`` and ``optimizer``, as far as they are there.
        step: the number of optimizer steps that were made.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or the folder can't be written.
        UsageError: there is no such object, or the names of an optimizer's parameters are not those of a model.
    """
    if step < 0:
        raise UsageError(f"--step is {step}, but must be at least 0.")
    reader = dcp.Reader(path)
    tops = sorted({key.partition(".")[0] for key in reader.keys})
    chosen = prefixes or {name: name for name in ("model", "optimizer") if name in tops}
    if not chosen:
        raise UsageError(
            f"{path} has neither 'model' nor 'optimizer', but {', '.join(tops)}: name what is to be imported, with "
            "--object model=PREFIX (--object model= if the keys of the weights have none)."
        )
    folder = Folder(Disk(output))
    folder.claim(sum(size.numel() * dtype.itemsize for size, dtype in filter(None, reader.keys.values())))
    try:
        if step in folder.steps():
            raise UsageError(f"{folder.name(step)} exists: name another folder, or remove it.")
        parts = {name: _read(reader, name, prefix, output) for name, prefix in chosen.items()}
        names = {}
        for name, state in parts.items():
            if any(key.startswith(f"{GROUPS}.") for key in state):
                parts[name], found = numbered(state)
                names[name] = _owned(name, found, parts)
        run: dict[str, Any] = {"steps": step, "scaler": None, "random": [], "names": names}
        about = {"unitrain": version("unitrain"), "torch": torch.__version__, "strategy": {}, "config": {}}
        folder.write(step, {**parts, RUN: run}, about)
        yield f"written: {folder.name(step)}"
    finally:
        folder.release()
    for name, prefix in chosen.items():
        yield f"{name}: {sum(1 for _ in tensors_of(parts[name]))} tensors, from {f'{prefix}.' if prefix else ''}..."
    yield "not there: the position in the data, random number generators, the loss scale, settings"


def _is_optimizer(state: Any) -> bool:
    return isinstance(state, dict) and set(state) == {STATE, GROUPS}


def _names(opened: Saved, optimizer: str, chosen: Prefixes) -> list[str]:
    """Return the names of an optimizer's parameters in the one object that has them all."""
    found = opened.parts[RUN].get("names", {}).get(optimizer)
    if found is None:
        raise UsageError(
            f"the checkpoint does not say which parameters {optimizer} has: it was saved by an older UniTrain, or "
            "without their model. Save it once more, with the model, or leave it out with --object model."
        )
    owners = sorted({owner for owner, _ in found})
    if len(owners) != 1 or owners[0] not in chosen:
        raise UsageError(
            f"{optimizer} has parameters of {' and '.join(owners)}: DCP's names are those of one model, which must be "
            f"exported with it. Leave {optimizer} out: name the other objects with --object."
        )
    return [name for _, name in found]


def _read(reader: dcp.Reader, name: str, prefix: str, folder: Path) -> dict[str, Any]:
    """Return the values whose keys begin with a prefix, without it. Tensors are in unnamed files, not in memory."""
    start = f"{prefix}." if prefix else ""
    optimizers = {key.partition(f".{GROUPS}.")[0] for key in reader.keys if f".{GROUPS}." in key}
    keys = [key for key in reader.keys if key.startswith(start)]
    if not prefix:  # a model without a prefix: the tensors that are of no optimizer
        keys = [k for k in keys if reader.keys[k] and not any(k.startswith(f"{one}.") for one in optimizers)]
    if not keys:
        raise UsageError(f"there is no key that begins with {start!r}, as {name} should: set it with --object.")
    state: dict[str, Any] = {key: _tensor(reader.keys[key], folder) for key in keys}
    reader.read(state)
    return {key.removeprefix(start): value for key, value in state.items()}


def _tensor(form: tuple[torch.Size, torch.dtype] | None, folder: Path) -> Tensor | None:
    """Return a tensor whose memory is a file without a name, in a folder."""
    if form is None or not form[0].numel():
        return None if form is None else torch.empty(form[0], dtype=form[1])
    size, dtype = form
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        return torch.from_file(file.name, shared=True, size=size.numel(), dtype=dtype).view(size)


def _owned(optimizer: str, names: list[str], parts: Mapping[str, Any]) -> list[list[str]]:
    """Return the names of an optimizer's parameters, with the object that has them."""
    owner = next((name for name, state in parts.items() if name != optimizer and state.keys() >= set(names)), None)
    if owner is None:
        raise UsageError(
            f"{optimizer} has parameters such as {names[0] if names else 'none'!r}, which no imported model has: name "
            "the model with --object, or import the weights alone."
        )
    return [[owner, name] for name in names]
