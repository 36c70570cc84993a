"""Finds and opens the checkpoint to resume from: the newest intact one, the best, or one that is named."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from unitrain.checkpoint.names import GROUPS, LEGACY, Keys, joined, numbered
from unitrain.checkpoint.run_state import RunState
from unitrain.checkpoint.sharded import legacy
from unitrain.checkpoint.sharded.dcp import METADATA, Region, Stored, from_bytes
from unitrain.checkpoint.store.folder import Folder
from unitrain.checkpoint.store.located import Located, NotACheckpointError, checkpoint_at, read, store_at, verified
from unitrain.checkpoint.store.manifest import RUN, DamagedError, Manifest
from unitrain.checkpoint.store.reading import MappedFiles
from unitrain.communication.communicator import Communicator
from unitrain.communication.streaming import Form, outline
from unitrain.errors import CheckpointError
from unitrain.process import print_stderr
from unitrain.url import parsed

T = TypeVar("T")
BEST = "best"
"""What ``resume`` takes for the best checkpoint."""


class OpenCheckpoint(NamedTuple):
    """An open checkpoint, in the process that has opened it."""

    found: Located
    parts: dict[str, Any]
    """The states by name. Their tensors are read from the disk when they are used; of those in ``stored``, forms."""
    stored: Stored | None
    """What several ranks have written."""
    digest: str | None
    """The SHA-256 of the metadata of that; empty if it has no metadata file."""
    files: MappedFiles

    def tensor(self, value: Tensor | Form) -> Tensor:
        """Return a tensor of ``parts``, or read the one that a form there stands for."""
        if isinstance(value, Tensor):
            return value
        assert self.stored is not None
        whole = self.stored.layout[str(value.key)].new()
        self.stored.read({str(value.key): (whole, Region.rows(0, whole))})
        return whole


def opened(found: Located) -> OpenCheckpoint:
    """Open a checkpoint. What one rank has written is verified; what several have written, when it is read.

    Raises:
        DamagedError: a file is missing or changed, or lacks what a run needs to continue.
        CheckpointError: a file contains more than tensors and plain data.
    """
    names, files = found.manifest.files, MappedFiles()
    parts = read(found, [name for name in names if name.endswith(".pt")], files)
    stored: Stored | None = None
    digest: str | None = None
    if METADATA in names or not names:
        name = found.file_name(METADATA)
        with found.store.file(name) if not names else verified(found, METADATA) as path:
            content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        stored = Stored.at(found, from_bytes(content, found.store.shown(name)))
        states, keys = _states(stored)
        run = parts.setdefault(RUN, {"steps": 0, "scaler": None, "random": []} if not names else {})
        run["names"] = {**run.get("names", {}), **keys}
        parts = {**states, **parts}
    elif any(name.startswith(LEGACY) for name in parts):
        digest = ""
        try:
            parts, stored = legacy.join(parts)
        except Exception as error:  # files that were made by hand may contain anything
            raise DamagedError(f"{found}: its shards do not fit its states: {error}") from error
    run = parts.get(RUN)
    if not isinstance(run, dict) or not {"steps", "scaler", "random"} <= set(run):
        raise DamagedError(f"{found}: {RUN}.pt is missing, or lacks what a run needs to continue")
    return OpenCheckpoint(found, parts, stored, digest, files)


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


# ------------------------------------------------------------------------------------------------------- on all ranks


class CheckpointView(NamedTuple):
    """An open checkpoint, as a rank sees it."""

    manifest: Manifest
    outlines: dict[str, Any]
    """The states by name, with the forms of the tensors in their places."""
    by_several: bool
    """Whether several ranks have written tensors."""
    stored: Stored | None
    """The tensors that several ranks have written, if this rank sees them."""
    each: bool
    """Whether each rank reads its own parts of them; else rank 0 reads all, and sends the parts."""
    saved: OpenCheckpoint | None
    """The checkpoint itself; on rank 0 only."""

    def source(self, name: str) -> Any:
        """Return a state with its tensors on rank 0, and None on the others."""
        return None if self.saved is None else self.saved.parts[name]

    def release(self) -> None:
        """Release the memory of what has been read."""
        if self.saved is not None:
            self.saved.files.release()

    def close(self) -> None:
        """Remove what was downloaded."""
        if self.stored is not None and self.stored.files is not None:
            self.stored.files.close()


class Search:
    """Looks for the checkpoint to resume from, as ``candidates`` does. Rank 0 chooses it; the others learn its outline.

    ``before`` is called first, on rank 0.
    """

    def __init__(
        self,
        communicator: Communicator,
        state: RunState,
        path: str | Path | None,
        folder: Folder,
        before: Callable[[], None],
    ) -> None:
        self._communicator = communicator
        self._state = state
        self._before = before
        self._candidates = candidates(path, folder)
        self._saved: OpenCheckpoint | None = None

    def next(self, damage: str | None = None) -> CheckpointView | None:
        """Open the first checkpoint, or the next one if that is damaged; None if there is none. Collective.

        Raises CheckpointError on every rank if none is intact.
        """
        told = self._communicator.on_main(lambda: self._find(damage))
        if told is None:
            return None
        dumped, outlines, digest, place = told
        manifest = Manifest.model_validate(dumped)
        stored = None if self._saved is None else self._saved.stored
        each = False
        if digest and self._communicator.shards:
            if not self._communicator.is_main:
                stored = _seen(place, manifest, digest)
            each = all(self._communicator.all_gather_data(stored is not None))
        return CheckpointView(manifest, outlines, digest is not None, stored, each, self._saved)

    def _find(self, damage: str | None) -> tuple[dict[str, Any], dict[str, Any], str | None, str] | None:
        self._before()
        saved = intact(self._candidates, opened, damage)
        if saved is None:
            return None
        if not saved.found.manifest.files:  # another tool has written it
            saved = _fitted(saved, self._state)
        self._saved = saved
        return saved.found.manifest.model_dump(), outline(saved.parts), saved.digest, saved.found.place


def _seen(place: str, manifest: Manifest, digest: str) -> Stored | None:
    """Return what rank 0 has found, on another rank; None if this rank does not see the same."""
    store = store_at(parsed(place))
    try:
        content = store.get(METADATA)
    except (OSError, CheckpointError):
        return None
    if hashlib.sha256(content).hexdigest() != digest:
        return None
    return Stored.at(Located(store, "", manifest), from_bytes(content, store.shown(METADATA)))


def _fitted(saved: OpenCheckpoint, state: RunState) -> OpenCheckpoint:
    """Return what another tool has written with the objects of this run. A model may have been saved without name."""
    parts, used = dict(saved.parts), (RUN, *state.modules, *state.optimizers)
    missing = [name for name in (*state.modules, *state.optimizers) if name not in parts]
    if "" in parts and len(missing) == 1 and missing[0] in state.modules:
        parts[missing.pop()] = parts[""]
    if missing:
        raise CheckpointError(
            f"{saved.found} has {', '.join(sorted(filter(None, saved.parts.keys() - {RUN})))}, but no {missing[0]}: "
            "name modules and optimizers in strategy.checkpoint as their keys begin there. Nothing was loaded."
        )
    return saved._replace(parts={name: its for name, its in parts.items() if name in used})


# ------------------------------------------------------------------------------------------------------- candidates

Candidates = Generator[Located, str | None, None]
"""Checkpoints in the order in which they are tried. It is sent what is damaged in one."""


def intact(search: Candidates, attempt: Callable[[Located], T], damage: str | None = None) -> T | None:
    """Return what ``attempt`` returns for the first checkpoint for which it raises no DamagedError, if there is one.

    ``damage`` is what is damaged in the checkpoint that ``search`` yielded before.
    """
    while True:
        try:
            found = search.send(damage)
        except StopIteration:
            return None
        try:
            return attempt(found)
        except DamagedError as error:
            damage = str(error)


def candidates(path: str | Path | None, folder: Folder) -> Candidates:
    """Yield the checkpoints that ``resume(path)`` may resume from.

    Raises CheckpointError if none is intact, is marked as the best or is in ``path``, or the one that is wanted is
    damaged.
    """
    if path is None:
        yield from _newest(folder)
    elif path == BEST:
        newest = next(_newest(folder), None)
        if newest is None:
            return
        best = newest.manifest.best
        if best is None:
            raise CheckpointError(
                f"no checkpoint in {folder} is marked as the best: save(best=True) marks one. resume() takes the "
                "newest."
            )
        yield from _only(lambda: folder.find(best), "the best checkpoint")
    else:
        yield from _only(lambda: _named(path, folder), "the checkpoint")


def _newest(folder: Folder) -> Candidates:
    """Yield the checkpoints of a run, the newest first, and report those that are damaged."""
    damaged = []
    for step in folder.steps():
        try:
            damage = yield folder.find(step)
        except DamagedError as error:
            damage = str(error)
        damaged.append(str(damage))
        print_stderr(f"unitrain: skipping a damaged checkpoint: {damage}")
    if damaged:
        raise CheckpointError(
            f"all checkpoints in {folder} are damaged ({'; '.join(damaged)}). To start a new run, use another folder."
        )


def _only(find: Callable[[], Located], what: str) -> Candidates:
    try:
        damage = yield find()
    except DamagedError as error:
        raise CheckpointError(f"{what} is damaged: {error}") from error
    raise CheckpointError(f"{what} is damaged: {damage}")


def _named(path: str | Path, folder: Folder) -> Located:
    try:
        return checkpoint_at(parsed(path))
    except NotACheckpointError as error:
        store = store_at(parsed(path))
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
