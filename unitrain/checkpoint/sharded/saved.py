"""Finds and opens the checkpoint to resume from: the newest intact one, the best, or one that is named. On rank 0."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from unitrain.checkpoint.sharded.verifying import JointVerification
from unitrain.checkpoint.store.folder import Folder, NotACheckpointError, Saved
from unitrain.checkpoint.store.local import LocalFolder, checkpoint_in
from unitrain.checkpoint.store.manifest import DamagedError
from unitrain.errors import CheckpointError
from unitrain.process import print_stderr
from unitrain.url import parsed

T = TypeVar("T")
BEST = "best"
"""What ``resume`` takes for the best checkpoint."""


def folder_at(path: str | Path) -> Folder:
    """Return the folder of checkpoints at a path or a URL, which is not looked at yet.

    Raises:
        UsageError: it is no URL that can be used.
    """
    place = parsed(path)
    if isinstance(place, Path):
        return LocalFolder(place)
    from unitrain.checkpoint.store.remote import RemoteFolder  # and fsspec

    return RemoteFolder(place)


def wanted(path: str | Path | None, folder: Folder, joint: JointVerification | None = None) -> Saved | None:
    """Return the checkpoint to resume from, or None if there is none.

    Args:
        path: of a checkpoint; ``"best"`` for the best; None for the newest.
        folder: that of this run's checkpoints.
        joint: has other ranks verify files with shards, too.

    Raises:
        CheckpointError: none is intact, is marked as the best or is in ``path``; or the one that is wanted is damaged.
    """
    if path is None:
        return _newest(folder, partial(folder.open, joint=joint))
    return _best(folder, joint) if path == BEST else _named(path, folder, joint)


def best_beside(opened: Saved, folder: Folder) -> int | None:
    """Return the step of the checkpoint in ``folder`` that was the best when ``opened`` was saved there, if any."""
    steps, step = folder.steps(), opened.manifest.best
    if step not in steps or opened.manifest.step not in steps:
        return None
    try:
        is_from_here = folder.manifest(opened.manifest.step) == opened.manifest
    except DamagedError:
        return None
    return step if is_from_here else None


def _newest(folder: Folder, read: Callable[[int], T]) -> T | None:
    """Return what ``read`` does for the newest checkpoint for which it raises no DamagedError. Report the others."""
    folder.recover()
    damaged = []
    for step in folder.steps():
        try:
            return read(step)
        except DamagedError as error:
            damaged.append(str(error))
            print_stderr(f"unitrain: skipping a damaged checkpoint: {error}")
    if damaged:
        raise CheckpointError(
            f"all checkpoints in {folder} are damaged ({'; '.join(damaged)}). To start a new run, use another folder."
        )
    return None


def _best(folder: Folder, joint: JointVerification | None) -> Saved | None:
    """Return the checkpoint that is the best according to the newest manifest."""
    manifest = _newest(folder, folder.manifest)
    if manifest is None:
        return None
    if manifest.best is None:
        raise CheckpointError(
            f"no checkpoint in {folder} is marked as the best: save(best=True) marks one. resume() takes the newest."
        )
    try:
        return folder.open(manifest.best, joint)
    except DamagedError as error:
        raise CheckpointError(f"the best checkpoint is damaged: {error}") from error


def _named(path: str | Path, folder: Folder, joint: JointVerification | None) -> Saved:
    place = parsed(path)
    try:
        if isinstance(place, Path):
            return checkpoint_in(place, joint)
        from unitrain.checkpoint.store.remote import checkpoint_under

        return checkpoint_under(place, joint)
    except NotACheckpointError as error:
        raise CheckpointError(
            f"{path} {error}, so it can't be resumed from. Name the folder of one checkpoint, {folder}/step-N, or None "
            f"for the newest in {folder}."
        ) from None
    except DamagedError as error:
        raise CheckpointError(f"the checkpoint is damaged: {error}") from error
