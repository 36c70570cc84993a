"""Finds and opens the checkpoint to resume from: the newest intact one, or one that is named. On rank 0."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from unitrain.checkpoint import storage
from unitrain.checkpoint.manifest import DamagedError, Manifest
from unitrain.checkpoint.mapped import MappedFiles
from unitrain.errors import CheckpointError
from unitrain.process import print_stderr

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
    storage.recover(root)
    damaged = []
    for folder in storage.found(root):
        try:
            return _opened(folder)
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
