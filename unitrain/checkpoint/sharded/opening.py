"""Finds and opens the checkpoint to resume from: the newest intact one, the best, or one that is named."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from unitrain.checkpoint.names import GROUPS, LEGACY, METADATA, Keys, joined, numbered
from unitrain.checkpoint.run_state import RunState
from unitrain.checkpoint.sharded.parts import Region
from unitrain.checkpoint.store.folder import Folder
from unitrain.checkpoint.store.located import Located, NotACheckpointError, checkpoint_at, read, store_at, verified
from unitrain.checkpoint.store.manifest import RUN, DamagedError, Manifest
from unitrain.checkpoint.store.mapped import MappedFiles
from unitrain.communication.communicator import Communicator
from unitrain.communication.streaming import Form, outline
from unitrain.errors import CheckpointError
from unitrain.process import print_stderr
from unitrain.url import parsed

if TYPE_CHECKING:  # torch.distributed.checkpoint is imported for what several ranks have written only
    from torch.distributed.checkpoint.metadata import Metadata

    from unitrain.checkpoint.sharded.stored import Stored

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
    files: MappedFiles

    def tensor(self, value: Tensor | Form) -> Tensor:
        """Return a tensor of ``parts``, or read the one that a form there stands for."""
        if isinstance(value, Tensor):
            return value
        assert self.stored is not None
        whole = value.empty(torch.device("cpu"))
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
    if METADATA in names or not names:
        from unitrain.checkpoint.sharded import metadata as metadatas
        from unitrain.checkpoint.sharded.stored import Stored

        name = found.file_name(METADATA)
        with found.store.file(name) if not names else verified(found, METADATA) as path:
            several = Stored.at(found, metadatas.from_bytes(path.read_bytes(), found.store.shown(name)))
        states, keys = _states(several)
        stored: Stored | None = several
        run = parts.setdefault(RUN, {"steps": 0, "scaler": None, "random": []} if not names else {})
        run["names"] = {**run.get("names", {}), **keys}
        parts = {**states, **parts}
    elif any(name.startswith(LEGACY) for name in parts):
        from unitrain.checkpoint.sharded import legacy

        try:
            parts, stored = legacy.join(parts)
        except Exception as error:  # files that were made by hand may contain anything
            raise DamagedError(f"{found}: its shards do not fit its states: {error}") from error
    else:
        stored = None
    run = parts.get(RUN)
    if not isinstance(run, dict) or not {"steps", "scaler", "random"} <= set(run):
        raise DamagedError(f"{found}: {RUN}.pt is missing, or lacks what a run needs to continue")
    return OpenCheckpoint(found, parts, stored, files)


def _states(stored: Stored) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return the states of objects, with forms in place of tensors, and the keys of optimizers' parameters, by name.

    What is under no name, as some tools save models, is returned under "".
    """
    paths: dict[str, Keys] = stored.metadata.planner_data or {}
    by_name: dict[str, dict[Keys, str]] = {}
    for key in stored.metadata.state_dict_metadata:
        path = tuple(paths.get(key, (key,)))
        name, rest = (path[0], path[1:]) if len(path) > 1 else ("", path)
        by_name.setdefault(name, {})[rest] = key
    for name, its in by_name.items():
        if any(rest[0] == GROUPS for rest in its):  # the rest of the options are given again, for each parameter
            by_name[name] = {rest: key for rest, key in its.items() if not rest[0].startswith(f"{GROUPS}.")}
    plain = [key for its in by_name.values() for key in its.values() if stored.tensor(key) is None]
    values = stored.values(plain)
    states, keys = {}, {}
    for name, its in by_name.items():
        found = {rest: _form(stored, key) or values[key] for rest, key in its.items()}
        if any(rest[0].split(".")[0] == GROUPS for rest in its):
            states[name], keys[name] = numbered(found)
        else:
            states[name] = {joined(rest): value for rest, value in found.items()}
    return states, keys


def _form(stored: Stored, key: str) -> Form | None:
    saved = stored.tensor(key)
    return None if saved is None else Form(torch.empty(saved.size, dtype=saved.properties.dtype, device="meta"), key)


# ------------------------------------------------------------------------------------------------------- on all ranks


class CheckpointView(NamedTuple):
    """An open checkpoint, as a rank sees it."""

    manifest: Manifest
    outlines: dict[str, Any]
    """The states by name, with the forms of the tensors in their places."""
    metadata: Metadata | None
    """Which parts of tensors several ranks have written."""
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
    """Looks for the checkpoint to resume from. Rank 0 chooses it, and the others learn its outline.

    Args:
        communicator: the communicator of this process.
        state: the state of the run.
        path: of a checkpoint; ``"best"`` for the best; None for the newest.
        folder: the folder of this run's checkpoints.
        before: called before, on rank 0.
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

        Args:
            damage: what is damaged in the checkpoint that this returned before.

        Raises:
            CheckpointError: none is intact; on every rank.
        """
        told = self._communicator.on_main(lambda: self._find(damage))
        if told is None:
            return None
        dumped, outlines, content, place = told
        manifest = Manifest.model_validate(dumped)
        metadata = None
        stored = None if self._saved is None else self._saved.stored
        each = False
        if content is not None:
            from unitrain.checkpoint.sharded import metadata as metadatas

            metadata = metadatas.from_bytes(content, place)
        if content is not None and metadata is not None and metadata.storage_data and self._communicator.shards:
            if not self._communicator.is_main:
                stored = _seen(place, manifest, metadata, content)
            each = all(self._communicator.all_gather_data(stored is not None))
        return CheckpointView(manifest, outlines, metadata, stored, each, self._saved)

    def _find(self, damage: str | None) -> tuple[dict[str, Any], dict[str, Any], bytes | None, str] | None:
        self._before()
        saved = intact(self._candidates, opened, damage)
        if saved is None:
            return None
        if not saved.found.manifest.files:  # another tool has written it
            saved = _fitted(saved, self._state)
        self._saved = saved
        content = None
        if saved.stored is not None:
            from unitrain.checkpoint.sharded import metadata as metadatas

            content = metadatas.to_bytes(saved.stored.metadata)
        return saved.found.manifest.model_dump(), outline(saved.parts), content, saved.found.place


def _seen(place: str, manifest: Manifest, metadata: Metadata, content: bytes) -> Stored | None:
    """Return what rank 0 has found, on another rank; None if this rank does not see the same."""
    from unitrain.checkpoint.sharded.stored import Stored

    store = store_at(parsed(place))
    try:
        sees = store.get(METADATA) == content
    except (OSError, CheckpointError):
        sees = False
    return Stored.at(Located(store, "", manifest), metadata) if sees else None


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

    Args:
        search: the checkpoints.
        attempt: called with a checkpoint.
        damage: what is damaged in the one that ``search`` yielded before.
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
    """Yield the checkpoints that can be resumed from.

    Args:
        path: of a checkpoint; ``"best"`` for the best; None for the newest.
        folder: the folder of a run's checkpoints.

    Raises:
        CheckpointError: none is intact, is marked as the best or is in ``path``; or the one that is wanted is damaged.
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
    folder.recover()
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
