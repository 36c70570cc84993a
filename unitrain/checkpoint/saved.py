"""Finds and opens the checkpoint to resume from: the newest intact one, or one that is named. On rank 0."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from unitrain.checkpoint import manifest as manifests
from unitrain.checkpoint import storage
from unitrain.checkpoint.manifest import DamagedError, Manifest
from unitrain.checkpoint.mapped import MappedFiles
from unitrain.errors import CheckpointError
from unitrain.process import print_stderr

T = TypeVar("T")
RUN = "_run"
METRICS = "_metrics"
"""Parts of a checkpoint that are not an object's state."""


class Saved(NamedTuple):
    """An intact checkpoint that is open."""

    folder: Path
    manifest: Manifest
    parts: dict[str, Any]
    """The states by name; their tensors are read from the disk when they are used."""
    files: MappedFiles


def newest(root: Path) -> Saved | None:
    """Return the newest intact checkpoint, or None if there is none. Damaged ones are reported on stderr.

    Raises:
        CheckpointError: all are damaged, or the newest intact one is of another version or contains code.
    """
    return _newest(root, _opened)


def best(root: Path) -> Saved | None:
    """Return the checkpoint that is the best according to the newest one, or None if there are none.

    Raises:
        CheckpointError: none is marked as the best, or the one that is, or every other, is damaged.
    """
    manifest = _newest(root, manifests.read)
    if manifest is None:
        return None
    if manifest.best is None:
        raise CheckpointError(
            f"no checkpoint in {root} is marked as the best: save(best=True) marks one. resume() takes the newest."
        )
    return named(storage.folder_of(root, manifest.best), root)


def best_beside(opened: Saved, root: Path) -> int | None:
    """Return the step of the checkpoint in ``root`` that was the best when ``opened`` was saved there, if any."""
    step = opened.manifest.best
    is_there = step is not None and storage.folder_of(root, step).exists()
    return step if is_there and opened.folder.parent.resolve() == root.resolve() else None


def _newest(root: Path, read: Callable[[Path], T]) -> T | None:
    """Return what ``read`` does for the newest checkpoint for which it raises no DamagedError."""
    storage.recover(root)
    damaged = []
    for folder in storage.found(root):
        try:
            return read(folder)
        except DamagedError as error:
            damaged.append(str(error))
            print_stderr(f"unitrain: skipping a damaged checkpoint: {error}")
    if damaged:
        raise CheckpointError(
            f"all checkpoints in {root} are damaged ({'; '.join(damaged)}). To start a new run, use another folder."
        )
    return None


def named(folder: Path, root: Path) -> Saved:
    """Return the checkpoint in ``folder``.

    Args:
        folder: it must be a checkpoint.
        root: the folder of this run's checkpoints, for messages.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    remedy = f"Name the folder of one checkpoint, {root}/step-N, or None for the newest in {root}."
    if not os.path.lexists(folder):
        raise CheckpointError(f"{folder} does not exist, so it can't be resumed from. {remedy}")
    if not os.path.lexists(folder / storage.MANIFEST):
        inside = next(storage.found(folder), None)
        kind = (
            "is no checkpoint" if inside is None else f"contains checkpoints, such as {inside.name}, but is none itself"
        )
        raise CheckpointError(f"{folder} {kind}, so it can't be resumed from. {remedy}")
    try:
        return _opened(folder)
    except DamagedError as error:
        raise CheckpointError(f"the checkpoint is damaged: {error}") from error


def _opened(folder: Path) -> Saved:
    manifest = storage.verify(folder)
    files = MappedFiles()
    parts = storage.read(folder, manifest.files, files)
    run = parts.get(RUN)
    if not isinstance(run, dict) or not {"steps", "scaler", "random"} <= set(run):
        raise DamagedError(f"{folder}: {RUN}.pt is missing, or lacks what a run needs to continue")
    return Saved(folder, manifest, parts, files)
