"""Finds and opens the checkpoint to resume from: the newest intact one, the best, or one that is named. On rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from unitrain.checkpoint.sharded import shards
from unitrain.checkpoint.sharded.verifying import JointVerification
from unitrain.checkpoint.store.folder import BEST, Folder
from unitrain.checkpoint.store.located import Located, NotACheckpointError, checkpoint_at, read
from unitrain.checkpoint.store.manifest import RUN, DamagedError, Manifest
from unitrain.checkpoint.store.mapped import MappedFiles
from unitrain.errors import CheckpointError
from unitrain.process import print_stderr
from unitrain.url import parsed

T = TypeVar("T")


class Saved(NamedTuple):
    """An intact checkpoint that is open."""

    manifest: Manifest
    parts: dict[str, Any]
    """The states by name; their tensors are read from the disk when they are used. Some are ``RowBlocks``."""
    files: MappedFiles
    name: str
    """Its path or URL."""

    @staticmethod
    def of(manifest: Manifest, parts: Mapping[str, Any], files: MappedFiles, name: str) -> Saved:
        """Return the checkpoint ``name``, given the content of its files.

        Raises:
            DamagedError: it lacks what a run needs to continue.
        """
        run = parts.get(RUN)
        if not isinstance(run, dict) or not {"steps", "scaler", "random"} <= set(run):
            raise DamagedError(f"{name}: {RUN}.pt is missing, or lacks what a run needs to continue")
        try:
            return Saved(manifest, shards.join(parts), files, name)
        except Exception as error:  # files that were made by hand may contain anything
            raise DamagedError(f"{name}: its shards do not fit its states: {error}") from error


def opened(found: Located, joint: JointVerification | None = None) -> Saved:
    """Verify and open a checkpoint; with ``joint``, other ranks verify and read files with shards, too.

    Raises:
        DamagedError: a file is missing or changed.
    """
    files, manifest = MappedFiles(), found.manifest
    several = [name for name in manifest.files if name.startswith(shards.PREFIX)] if joint is not None else []
    parts = joint.read(found, several) if joint is not None and several else None
    if joint is not None and parts is not None:
        files = joint.files
    alone = [name for name in manifest.files if parts is None or name not in several]
    return Saved.of(manifest, {**read(found, alone, files), **(parts or {})}, files, str(found))


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
        return _newest(folder, lambda step: opened(folder.find(step), joint))
    return _best(folder, joint) if path == BEST else _named(path, folder, joint)


def best_beside(manifest: Manifest, folder: Folder) -> int | None:
    """Return the step of the best checkpoint in ``folder``, given the manifest of one that was saved there, if any."""
    steps, step = folder.steps(), manifest.best
    if step not in steps or manifest.step not in steps:
        return None
    try:
        is_from_here = folder.find(manifest.step).manifest == manifest
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
    manifest = _newest(folder, lambda step: folder.find(step).manifest)
    if manifest is None:
        return None
    if manifest.best is None:
        raise CheckpointError(
            f"no checkpoint in {folder} is marked as the best: save(best=True) marks one. resume() takes the newest."
        )
    try:
        return opened(folder.find(manifest.best), joint)
    except DamagedError as error:
        raise CheckpointError(f"the best checkpoint is damaged: {error}") from error


def _named(path: str | Path, folder: Folder, joint: JointVerification | None) -> Saved:
    try:
        return opened(checkpoint_at(parsed(path)), joint)
    except NotACheckpointError as error:
        raise CheckpointError(
            f"{path} {error}, so it can't be resumed from. Name the folder of one checkpoint, {folder}/step-N, or None "
            f"for the newest in {folder}."
        ) from None
    except DamagedError as error:
        raise CheckpointError(f"the checkpoint is damaged: {error}") from error
