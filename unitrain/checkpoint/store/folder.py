"""``Folder``: the checkpoints of a run, one folder per step, on a disk or in an object store.

A checkpoint's manifest is written last, and has the size and SHA-256 of every file. There is no other record that could
be wrong: the newest checkpoint is found by the names of the folders.

* On a disk, a folder is written under a temporary name and renamed at the end: it exists either completely or not at
  all. A step that is saved again is set aside first, and brought back if the process is killed before the new one is
  there.
* Objects can't be renamed: a folder without a manifest is no checkpoint. A step that is saved again gets a folder of
  its own, ``step-0000000120.2``, and the one before is removed when that is complete.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from unitrain.checkpoint.store import manifest as manifests
from unitrain.checkpoint.store.located import Located, locate, store_at
from unitrain.checkpoint.store.lock import Lock, holder_of
from unitrain.checkpoint.store.manifest import FOLDER, folder_name
from unitrain.checkpoint.store.reading import reason
from unitrain.checkpoint.store.store import Store
from unitrain.checkpoint.store.writing import check_part, write_part
from unitrain.errors import CheckpointError
from unitrain.process import print_stderr
from unitrain.url import parsed

BEST = "best"
_ASIDE = ".aside.tmp"
_TEMPORARY = re.compile(r"\.step-\d{10}\..*\.tmp")
_THREADS = 4

Others = Callable[[], Mapping[str, Any]]
"""Waits for the files that other ranks write, and returns what the manifest says of them."""


class Draft:
    """A checkpoint that is being written, perhaps by several ranks. It has no manifest yet.

    ``name`` is its folder until it is complete; ``token`` is that of rank 0's lock.
    """

    def __init__(self, store: Store, name: str, token: str) -> None:
        self.store: Store = store
        self.name: str = name
        self._token = token

    @property
    def place(self) -> list[str]:
        """What ``Folder.join`` finds it by on another rank."""
        return [self.store.location, self.name, self._token]

    def write(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Write each part to a file, checked and synced, and return what the manifest says of the files."""
        files: dict[str, Any] = {}
        with ExitStack() as drafts, ThreadPoolExecutor(_THREADS, "checkpoint files") as threads:
            putting: list[Future[None]] = []

            def put(name: str, draft: Path) -> None:
                check_part(draft)
                self.store.put(name, draft)

            for part, value in parts.items():
                name = f"{self.name}/{part}.pt"
                draft = drafts.enter_context(self.store.draft(name))
                # A file is checked and put while the rest of it is hashed, and on a disk while the next is written.
                later = partial(threads.submit, put, name, draft)
                files[f"{part}.pt"] = write_part(draft, value, lambda later=later: putting.append(later()))  # type: ignore[misc]
                if not self.store.renames:
                    putting.pop().result()
                    drafts.close()  # one part at a time is on this disk
            for one in putting:
                one.result()
        return files

    def tell(self, rank: int, text: str) -> None:
        """Leave a text of a rank for rank 0."""
        self.store.put(self._message(rank), text.encode())

    def told(self, rank: int) -> str | None:
        """Take the text that a rank has left; None if there is none yet."""
        try:
            text = self.store.get(self._message(rank)).decode()
        except FileNotFoundError:
            return None
        self.store.remove(self._message(rank))
        return text

    def _message(self, rank: int) -> str:
        return f"{self.name}/rank-{rank}.json"


class Folder:
    """The checkpoints of a run, by their steps. Used on rank 0, except ``join``. Its string is the path or the URL.

    All methods raise CheckpointError if the folder can't be read or written.

    Args:
        store: the folder, which ``claim`` makes.

    Attributes:
        store: as given.
    """

    def __init__(self, store: Store) -> None:
        self.store: Store = store
        self._lock: Lock | None = None
        self._used: set[str] = set()  # names of folders that are, or were, in the store
        self._joined: Store | None = None  # where rank 0 writes, on another rank, if it sees that
        self._looked = False

    def __str__(self) -> str:
        return str(self.store)

    def claim(self, needed: int) -> None:
        """Check that a checkpoint of at least ``needed`` bytes can be written, and keep other jobs from the folder."""
        self.store.probe(needed)
        self._lock = Lock(self.store)

    def check(self) -> None:
        """Check that no other job has taken the folder."""
        if self._lock is not None:
            self._lock.check()

    def release(self) -> None:
        """Let other jobs use the folder. Further calls do nothing."""
        if self._lock is not None:
            self._lock.release()
        if self.store.renames:
            self._lock = None  # what is being written in the background may be completed: it appears as a whole

    # ---------------------------------------------------------------------------------------------- what is there

    def name(self, step: int) -> str:
        """Return the path or URL of a step's checkpoint."""
        return self.store.shown(self._at(step))

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, newest first. It may be damaged, but is not half written."""
        return sorted(self._complete(), reverse=True)

    def find(self, step: int) -> Located:
        """Return the checkpoint of a step, whose files are not verified yet. Raises DamagedError as ``locate`` does."""
        return locate(self.store, self._at(step))

    def _at(self, step: int) -> str:
        name = folder_name(step)
        return name if self.store.renames else self._complete().get(step, name)

    def _names(self, folder: str = "") -> list[str]:
        """Return all names in a folder; none if there is no such folder."""
        with self._errors(f"{self.store.shown(folder)} can't be listed"):
            try:
                return self.store.list(folder)
            except (FileNotFoundError, NotADirectoryError):
                return []

    def _complete(self, names: Sequence[str] | None = None) -> dict[int, str]:
        """Return the folders of checkpoints by their step: in an object store, those with a manifest.

        Of several of one step, it is the last.
        """
        found: dict[int, str] = {}
        names = self._names() if names is None else names
        self._used.update(names)
        for name in sorted(names, key=_attempt):
            match = FOLDER.fullmatch(name)
            if match and (match[2] is None if self.store.renames else manifests.NAME in self._names(name)):
                found[int(match[1])] = name
        return found

    # ------------------------------------------------------------------------------------------------------ writing

    def begin(self, step: int) -> Draft | None:
        """Begin a checkpoint whose files several ranks write. Return None if only rank 0 can write here.

        A server is not waited for here, but in the background.
        """
        return None if self.store.few_writes else self._begin(step)

    def join(self, place: Sequence[str]) -> Draft | None:
        """Return, on another rank, the checkpoint that rank 0 has begun at a place; None if this rank does not see it.

        Raises CheckpointError, once, if it can't look.
        """
        location, name, token = place
        if not self._looked:
            self._looked = True
            store = store_at(parsed(location))
            if _sees(store, name, token):
                self._joined = store
        return None if self._joined is None else Draft(self._joined, name, token)

    def _begin(self, step: int) -> Draft:
        name, token = folder_name(step), self._lock.token if self._lock is not None else ""
        if self.store.renames:
            self.check()
            self._sweep_disk()
            draft = f".{name}.{os.getpid()}.tmp"
            with self._errors(f"checkpoint {self.store.shown(name)} could not be written"):
                self.store.make(draft)
            return Draft(self.store, draft, token)
        if not self._used:
            self._complete()
        # A name that was used may still get files, of a rank that is slow. The last one of a step is the newest.
        attempts = [_attempt(one) for one in self._used if one.partition(".")[0] == name]
        draft = f"{name}.{max(attempts) + 1}" if attempts else name
        self._used.add(draft)
        return Draft(self.store, draft, token)

    def write(
        self,
        step: int,
        parts: Mapping[str, Any],
        about: Mapping[str, Any],
        draft: Draft | None = None,
        others: Others = dict,
    ) -> None:
        """Write a checkpoint, which is complete or not there. Remove what killed processes left incomplete.

        Args:
            step: number of the step.
            parts: states by name: tensors and plain data.
            about: plain data for the manifest.
            draft: what ``begin`` returned.
            others: waits for the files that other ranks write there, and returns what the manifest says of them.
        """
        draft = draft or self._begin(step)
        before = {} if self.store.renames else self._sweep_objects(draft.name)
        try:
            files = {**draft.write(parts), **others()}
            if not self.store.renames:
                self.check()  # another job may have taken the folder meanwhile
            self.store.put(f"{draft.name}/{manifests.NAME}", manifests.to_json(step, about, files).encode())
            if self.store.renames:
                aside = self._set_aside(folder_name(step))
                self.store.rename(draft.name, folder_name(step))
                self.store.remove(aside)
        except Exception as error:  # pickling may raise any exception
            if self.store.renames:
                with suppress(OSError):
                    self.store.remove(draft.name)
            if isinstance(error, CheckpointError):
                raise
            why = self.store.reason(error) if isinstance(error, OSError) else reason(error)
            shown = self.store.shown(folder_name(step) if self.store.renames else draft.name)
            raise CheckpointError(f"checkpoint {shown} could not be written: {why}") from error
        if step in before:
            self._remove_objects(before[step])

    def recover(self) -> None:
        """Bring back what a process that was killed had set aside for a new checkpoint of the same step."""
        names = self._names() if self.store.renames else []
        for aside in filter(_TEMPORARY.fullmatch, names):
            name = aside[1 : -len(_ASIDE)]
            if aside.endswith(_ASIDE) and name not in names and manifests.NAME in self._names(aside):
                with self._errors(f"a checkpoint in {self} that was set aside can't be restored"):
                    self.store.rename(aside, name)

    def _sweep_disk(self) -> None:
        """Remove incomplete checkpoints of killed processes."""
        self.recover()
        for name in filter(_TEMPORARY.fullmatch, self._names()):
            with suppress(OSError):  # it only takes up space
                self.store.remove(name)

    def _sweep_objects(self, draft: str) -> dict[int, str]:
        """Remove incomplete checkpoints, but for the one that is being written. Return the complete ones."""
        folders = [name for name in self._names() if FOLDER.fullmatch(name) and name != draft]
        complete = self._complete(folders)
        for name in folders:
            if name not in complete.values():
                self._remove_objects(name)
        return complete

    # ----------------------------------------------------------------------------------------------------- removing

    def remove(self, step: int) -> None:
        """Remove a checkpoint, at once as others see it."""
        name = self._complete().get(step)
        if name is None:
            return
        if not self.store.renames:
            self._remove_objects(name)
            self._used.discard(name)
            return
        with self._errors(f"{self.store.shown(name)} can't be removed"):
            self.store.remove(self._set_aside(name))

    def prune(self, keep: int, best: int | None = None) -> None:
        """Remove the oldest checkpoints beyond ``keep``, but not the one of step ``best``.

        One that can't be removed is reported on stderr.
        """
        for step in self.steps()[keep:]:
            if step == best:
                continue
            try:
                self.remove(step)
            except CheckpointError as error:
                print_stderr(f"unitrain: an old checkpoint is kept: {error}")

    def point_to_best(self, step: int | None) -> None:
        """Have the name ``best`` lead people to the checkpoint of a step, if there is one. A failure is reported.

        It is for people, since the manifests say what the best is. So it is no error if a file system has no links.
        """
        try:
            self.store.point(BEST, None if step is None else self._complete().get(step))
        except (OSError, CheckpointError) as error:
            print_stderr(
                f"unitrain: {self.store.shown(BEST)} is not the link to the best checkpoint: {error}. "
                'resume("best") needs no link.'
            )

    def _set_aside(self, name: str) -> str:
        """Rename a folder of a disk, if it is there, and return its new name."""
        aside = f".{name}{_ASIDE}"
        self.store.remove(aside)
        with suppress(FileNotFoundError):
            self.store.rename(name, aside)
        return aside

    def _remove_objects(self, name: str) -> None:
        """Remove a folder. Without its manifest, which goes first, it is no checkpoint any more."""
        for file in [manifests.NAME, *self._names(name)]:
            self.store.remove(f"{name}/{file}")

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Raise errors of a disk as CheckpointError."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{what}: {self.store.reason(error)}") from error


def _sees(store: Store, draft: str, token: str) -> bool:
    """Return whether this process sees the store that rank 0 writes to."""
    if store.renames:
        with suppress(OSError):  # of a name that is new, a network file system knows no earlier answer
            store.list(draft)
            return True
        return False
    holder = holder_of(store)
    return holder is not None and holder.token == token


def _attempt(name: str) -> int:
    """Return how many times a step had been saved when this folder was written."""
    match = FOLDER.fullmatch(name)
    return int(match[2] or 1) if match else 0
