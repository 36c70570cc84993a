"""Finds and opens a checkpoint to resume from, in one process: the newest intact one, the best, or one by its path."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from unitrain.checkpoint.names import GROUPS, numbered_state
from unitrain.checkpoint.sharded.dcp import METADATA, Stored
from unitrain.checkpoint.store.folder import Folder
from unitrain.checkpoint.store.located import (
    RUN,
    DamagedError,
    Located,
    NotACheckpointError,
    checkpoint_at,
    intact,
    verified,
)
from unitrain.checkpoint.store.torch_files import MappedFiles
from unitrain.communication.state_transfer import Form
from unitrain.errors import CheckpointError
from unitrain.process import print_stderr

T = TypeVar("T")


class Search:
    """The checkpoints that ``resume(path)`` may resume from, in the order in which they are tried.

    Without a path, these are the newest of the folder. The folder is looked at when one of them is asked for.

    Args:
        folder: the folder of the run's checkpoints.
        path: as of ``resume``.
        first: checkpoints to try before those of the folder.
        only: whether no others than ``first`` will do.

    That those in ``first`` can't be used is reported, and no error: a run is not to fail for them.
    """

    def __init__(
        self, folder: Folder, path: str | Path | None = None, first: Sequence[Located] = (), *, only: bool = False
    ) -> None:
        self._folder, self._path, self._first, self._only = folder, path, first, only
        self._wanted = ""  # what is wanted, if no other one will do
        self._damage: list[str] = []  # of the folder's
        self._is_extra = False  # the one that was tried last is of ``first``
        self._finders = self._found()

    def _found(self) -> Iterator[Located | Callable[[], Located]]:
        """Yield checkpoints, or functions that return one or raise DamagedError: a generator ends with an error."""
        folder, path = self._folder, self._path
        for located in self._first:
            self._is_extra = True
            yield located
        self._is_extra = False
        if self._only:
            return
        if path is None:
            for step in folder.steps():
                yield partial(folder.find, step)
        elif path != "best":
            self._wanted = "the checkpoint"
            yield partial(_named, path, folder)
        elif (newest := Search(folder).next(lambda located: located)) is not None:
            if newest.manifest.best is None:
                raise CheckpointError(
                    f"no checkpoint in {folder} is marked as the best: save(best=True) marks one. resume() takes the "
                    "newest."
                )
            self._wanted = "the best checkpoint"
            yield partial(folder.find, newest.manifest.best)

    def next(self, attempt: Callable[[Located], T]) -> T | None:
        """Return the result of ``attempt`` for the next checkpoint that is not damaged; None if none is left.

        Raises CheckpointError if the one that is wanted, or each of them, is damaged.
        """
        for find in self._finders:
            try:
                return attempt(find() if callable(find) else find)
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
        if not self._is_extra:
            self._damage.append(damage)
        print_stderr(f"unitrain: skipping a damaged checkpoint: {damage}")

    def refuse(self, why: str) -> None:
        """Report that the checkpoint that was tried last does not fit the run. Raises CheckpointError if it has to."""
        if not self._is_extra:
            raise CheckpointError(why)
        print_stderr(f"unitrain: skipping a checkpoint that does not fit this run: {why}")


def _named(path: str | Path, folder: Folder) -> Located:
    try:
        return checkpoint_at(path)
    except NotACheckpointError as error:
        raise CheckpointError(
            f"{path} {error}, so it can't be resumed from. Name the folder of one checkpoint, {folder}/step-N, or None "
            f"for the newest in {folder}."
        ) from None


def best_beside(located: Located, folder: Folder) -> int | None:
    """Return the step of the best checkpoint in ``folder``, as another one says, if that is from this folder."""
    # In another folder, a checkpoint of the same step is another one.
    beside = located.place.rpartition("/")[0] == folder.store.location
    return located.manifest.best if beside and located.manifest.best in folder.steps() else None


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

    located: Located
    parts: dict[str, Any]  # states by name. Their tensors are read when they are used; of those in ``stored``, forms
    stored: Stored | None  # what several ranks have written
    files: MappedFiles

    def tensor(self, value: Tensor | Form) -> Tensor:
        """Return a tensor of ``parts``, or read the one that a form there stands for."""
        if isinstance(value, Tensor):
            return value
        assert self.stored is not None
        return self.stored.whole(str(value.key))


def opened(located: Located) -> OpenCheckpoint:
    """Open a checkpoint. Files of one rank are verified now; files of several ranks, when they are read.

    Tensors are read from the disk when they are used. Pickled code is refused, and never run. A file that is missing or
    changed is a DamagedError.
    """
    with intact(str(located)):
        names, files = located.manifest.files, MappedFiles()
        parts: dict[str, Any] = {}
        for name in (name for name in names if name.endswith(".pt")):
            with verified(located, name) as path, intact(located.store.shown(located.file_name(name))):
                parts[name.removesuffix(".pt")] = files.load(path)
        run = parts.get(RUN)
        if not isinstance(run, dict) or not {"steps", "random", "names"} <= set(run):
            raise DamagedError(f"{located}: {RUN}.pt is missing, or lacks what a run needs to continue")
        run["names"] = json.loads(run["names"])
        stored: Stored | None = None
        if METADATA in names:
            with verified(located, METADATA) as path:
                stored = Stored(located, path.read_bytes())
            unlisted = {info.relative_path for info in stored.metadata.storage_data.values()} - names.keys()
            if unlisted:
                raise DamagedError(f"{located}: its manifest lacks {min(unlisted)}")
            parts = {**_states(stored), **parts}
        return OpenCheckpoint(located, parts, stored, files)


def _states(stored: Stored) -> dict[str, Any]:
    """Return the states of modules and optimizers by name, with forms in place of tensors."""
    states = _Branch()
    for key, form in stored.metadata.state_dict_metadata.items():
        *path, last = stored.metadata.planner_data[key]
        branch = states
        for step in path:
            branch = branch.setdefault(step, _Branch())
        branch[last] = Form(stored.empty(key, "meta"), key) if hasattr(form, "size") else stored.value(key)
    by_name = {name: _nested(state) for name, state in states.items()}
    return {name: numbered_state(state) if GROUPS in state else state for name, state in by_name.items()}


class _Branch(dict[Any, Any]):
    """A dict, or a list by its positions, in nested state. Other dicts are values."""


def _nested(value: Any) -> Any:
    """Return nested dicts and lists in place of branches."""
    if not isinstance(value, _Branch):
        return value
    items = {key: _nested(item) for key, item in value.items()}
    return [items[position] for position in range(len(items))] if 0 in items else items
