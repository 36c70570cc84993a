"""Finds and opens a checkpoint to resume from, in one process: the newest intact one, the best, or one by its path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from unitrain.checkpoint.names import GROUPS, Keys, joined, numbered
from unitrain.checkpoint.sharded.dcp import METADATA, Stored
from unitrain.checkpoint.store.folder import BEST, Folder
from unitrain.checkpoint.store.located import (
    RUN,
    DamagedError,
    Located,
    Manifest,
    NotACheckpointError,
    checkpoint_at,
    read,
    store_at,
    verified,
)
from unitrain.checkpoint.store.store import NAME
from unitrain.checkpoint.store.torch_files import MappedFiles
from unitrain.communication.state_transfer import Form
from unitrain.errors import CheckpointError
from unitrain.process import print_stderr

T = TypeVar("T")


class Search:
    """The checkpoints that ``resume(path)`` may resume from, in the order in which they are tried.

    Without a path, these are the newest of the folder, after those that are to be tried ``first``. The folder is looked
    at when the first one is asked for.
    """

    def __init__(self, folder: Folder, path: str | Path | None = None, first: Sequence[Located] = ()) -> None:
        self._folder, self._path, self._first = folder, path, first
        self._wanted = ""  # what is wanted, if no other one will do
        self._damage: list[str] = []

    @cached_property
    def _left(self) -> list[Located | Callable[[], Located]]:
        """The checkpoints that were not tried yet."""
        folder, path = self._folder, self._path
        if path is None:
            for shown in folder.incomplete():
                print_stderr(f"unitrain: skipping an incomplete checkpoint: {shown} has no {NAME}")
            return [*self._first, *(partial(folder.find, step) for step in folder.steps())]
        if path != BEST:
            self._wanted = "the checkpoint"
            return [partial(_named, path, folder)]
        newest = Search(folder).next(lambda found: found)
        if newest is None:
            return []
        if newest.manifest.best is None:
            raise CheckpointError(
                f"no checkpoint in {folder} is marked as the best: save(best=True) marks one. resume() takes the "
                "newest."
            )
        self._wanted = "the best checkpoint"
        return [partial(folder.find, newest.manifest.best)]

    def next(self, attempt: Callable[[Located], T]) -> T | None:
        """Return the result of ``attempt`` for the next checkpoint that is not damaged; None if none is left.

        Raises CheckpointError if the one that is wanted, or each of them, is damaged.
        """
        while self._left:
            following = self._left.pop(0)
            try:
                return attempt(following if isinstance(following, Located) else following())
            except DamagedError as error:
                self.reject(str(error))
        if self._damage:
            raise CheckpointError(
                f"all checkpoints in {self._folder} are damaged ({'; '.join(self._damage)}). To start a new run, use "
                "another folder."
            )
        return None

    def reject(self, damage: str) -> None:
        """Report that the checkpoint that was tried last is damaged. Raises CheckpointError if it is wanted."""
        if self._wanted:
            raise CheckpointError(f"{self._wanted} is damaged: {damage}")
        self._damage.append(damage)
        print_stderr(f"unitrain: skipping a damaged checkpoint: {damage}")


def _named(path: str | Path, folder: Folder) -> Located:
    try:
        return checkpoint_at(path)
    except NotACheckpointError as error:
        store = store_at(path)
        try:
            if METADATA in store.list():  # of another tool
                return Located(store, "", Manifest(step=0, strategy={}, config={}, files={}))
        except OSError:
            pass
        raise CheckpointError(
            f"{path} {error}, so it can't be resumed from. Name the folder of one checkpoint, {folder}/step-N, or None "
            f"for the newest in {folder}."
        ) from None


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


def best_in(folder: Folder) -> int | None:
    """Return the step of the best checkpoint in ``folder``, as its newest intact one says."""
    steps = folder.steps()
    for step in steps:
        try:
            best = folder.find(step).manifest.best
        except DamagedError:
            continue
        return best if best in steps else None
    return None


class OpenCheckpoint(NamedTuple):
    """An open checkpoint, in the process that has opened it."""

    found: Located
    parts: dict[str, Any]  # states by name. Their tensors are read when they are used; of those in ``stored``, forms
    stored: Stored | None  # what several ranks have written
    files: MappedFiles

    def tensor(self, value: Tensor | Form) -> Tensor:
        """Return a tensor of ``parts``, or read the one that a form there stands for."""
        if isinstance(value, Tensor):
            return value
        assert self.stored is not None
        return self.stored.whole(str(value.key))


def opened(found: Located) -> OpenCheckpoint:
    """Open a checkpoint. Files of one rank are verified now; files of several ranks, when they are read."""
    try:
        return _opened(found)
    except (DamagedError, CheckpointError):
        raise
    except Exception as error:  # what is not as it was written ends in many kinds of exceptions
        raise DamagedError(f"{found}: its files are no checkpoint: {type(error).__name__}: {error}") from error


def _opened(found: Located) -> OpenCheckpoint:
    names, files = found.manifest.files, MappedFiles()
    parts = read(found, [name for name in names if name.endswith(".pt")], files)
    stored: Stored | None = None
    if METADATA in names or not names:
        name = found.file_name(METADATA)
        with found.store.file(name) if not names else verified(found, METADATA) as path:
            stored = Stored(found, path.read_bytes())
        unlisted = {piece.file for entry in stored.layout.values() for piece in entry.pieces} - names.keys()
        if names and unlisted:
            raise DamagedError(f"{found}: its manifest lacks {min(unlisted)}")
        states, keys = _states(stored)
        run = parts.setdefault(RUN, {"steps": 0, "random": []} if not names else {})
        run["names"] = {**run.get("names", {}), **keys}
        parts = {**states, **parts}
    run = parts.get(RUN)
    if not isinstance(run, dict) or not {"steps", "random", "names"} <= set(run):
        raise DamagedError(f"{found}: {RUN}.pt is missing, or lacks what a run needs to continue")
    return OpenCheckpoint(found, parts, stored, files)


def _states(stored: Stored) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return the states of objects, with forms in place of tensors, and the keys of optimizers' parameters, by name.

    What is under no name, as some tools save models, is returned under "".
    """
    by_name: dict[str, dict[Keys, str]] = {}
    for key, entry in stored.layout.items():
        name, rest = (entry.path[0], entry.path[1:]) if len(entry.path) > 1 else ("", entry.path)
        by_name.setdefault(name, {})[rest] = key
    for name, its in by_name.items():
        if any(rest[0] == GROUPS for rest in its):  # the rest of the options are given again, for each parameter
            by_name[name] = {rest: key for rest, key in its.items() if not rest[0].startswith(f"{GROUPS}.")}
    states, keys = {}, {}
    for name, its in by_name.items():
        found = {rest: _value(stored, key) for rest, key in its.items()}
        if any(rest[0].split(".")[0] == GROUPS for rest in its):
            states[name], keys[name] = numbered(found)
        else:
            states[name] = {joined(rest): value for rest, value in found.items()}
    return states, keys


def _value(stored: Stored, key: str) -> Any:
    entry = stored.layout[key]
    return stored.value(key) if entry.dtype is None else Form(entry.new("meta"), key)
