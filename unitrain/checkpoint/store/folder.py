"""``Folder``: the checkpoints of a run, one folder per step, on a disk or in an object store.

A checkpoint's manifest is written last, and has the size and XXH3-128 of every file. There is no other record that
could be wrong: the newest checkpoint is found by the names of the folders. A step that is saved again gets a folder of
its own, ``step-0000000120.2``, and the one before is removed when that is complete. A folder without a manifest is not
a checkpoint, but what a killed process has left, which the next save removes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.located import Located, locate, to_json
from unitrain.checkpoint.store.lock import Lock
from unitrain.checkpoint.store.store import FOLDER, NAME, Store, folder_name
from unitrain.checkpoint.store.torch_files import save_without_crc
from unitrain.errors import CheckpointError
from unitrain.process import print_stderr

_THREADS = 4


class Draft(NamedTuple):
    """A checkpoint that is being written to a folder of a store, perhaps by several ranks. It has no manifest yet."""

    store: Store
    name: str  # of the folder

    def write(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Write each part to a file, checked and synced. Return the files' entries in the manifest."""

        def write(part: str) -> tuple[str, Any]:
            return f"{part}.pt", self.store.write(f"{self.name}/{part}.pt", parts[part], save_without_crc)

        # Of files that are uploaded, one at a time is on this disk.
        with ThreadPoolExecutor(_THREADS if isinstance(self.store, Disk) else 1, "checkpoint files") as threads:
            return dict(threads.map(write, parts))

    def complete(self, step: int, about: Mapping[str, Any], files: Mapping[str, Any]) -> None:
        """Write the manifest, given plain data and the files' entries, so that this is a checkpoint."""
        self.store.put(f"{self.name}/{NAME}", to_json(step, about, files).encode())
        self.store.sync(self.name)


class Folder:
    """The checkpoints of a run, by their steps. Used on rank 0. Its string is the path or the URL.

    All methods raise CheckpointError if the folder can't be read or written. ``claim`` makes it.
    """

    def __init__(self, store: Store) -> None:
        self.store: Store = store
        self._lock: Lock | None = None
        self._used: set[str] = set()  # names of folders that are, or were, in the store
        self._lasting: dict[str, bytes] = {}  # files of the run beside its checkpoints

    def __str__(self) -> str:
        return str(self.store)

    def claim(self, needed: int) -> None:
        """Check that a checkpoint of at least ``needed`` bytes can be written, and keep other jobs from the folder."""
        self.store.probe(needed)
        self._lock = Lock(self.store)

    def check(self) -> None:
        """Check that no other job has taken the folder. If it is made again, put the files back that are to last."""
        if self._lock is not None and self._lock.check():
            for name, content in self._lasting.items():
                self.put(name, content)

    def put(self, name: str, content: bytes) -> None:
        """Write a file that lasts as long as the run uses the folder."""
        with self.store.explained(f"{self.store.shown(name)} can't be written"):
            self.store.put(name, content)
        self._lasting[name] = content

    def release(self) -> None:
        """Let other jobs use the folder. Further calls do nothing."""
        if self._lock is not None:
            self._lock.release()

    def name(self, step: int) -> str:
        """Return the path or URL of a step's checkpoint."""
        return self.store.shown(self._at(step))

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, newest first. It may be damaged, but is not half written."""
        return sorted(self._complete(), reverse=True)

    def find(self, step: int) -> Located:
        """Return the checkpoint of a step, without verifying its files. Raises DamagedError as ``locate`` does."""
        return locate(self.store, self._at(step))

    def _at(self, step: int) -> str:
        return self._complete().get(step, folder_name(step))

    def _names(self, folder: str = "") -> list[str]:
        """Return all names in a folder; none if there is no such folder."""
        with self.store.explained(f"{self.store.shown(folder)} can't be listed"):
            try:
                return self.store.list(folder)
            except (FileNotFoundError, NotADirectoryError):
                return []

    def _complete(self, names: Sequence[str] | None = None) -> dict[int, str]:
        """Return the folders of checkpoints by their step. Of several of one step, it is the last."""
        complete: dict[int, str] = {}
        names = self._names() if names is None else names
        self._used.update(names)
        for name in sorted(names, key=_attempt):
            match = FOLDER.fullmatch(name)
            if match and NAME in self._names(name):
                complete[int(match[1])] = name
        return complete

    def begin(self, step: int) -> Draft:
        """Begin a checkpoint. A server is not waited for here, but when it is written."""
        if isinstance(self.store, Disk):
            self.check()
        if isinstance(self.store, Disk) or not self._used:
            self._complete()
        # A name that was used may still get files, of a rank that is slow. The last one of a step is the newest.
        used = _of_step(step, self._used)
        draft = f"{folder_name(step)}.{_attempt(used[-1]) + 1}" if used else folder_name(step)
        self._used.add(draft)
        with self.store.explained(f"checkpoint {self.store.shown(draft)} could not be written"):
            self.store.make(draft)
        return Draft(self.store, draft)

    def write(
        self,
        step: int,
        parts: Mapping[str, Any],
        about: Mapping[str, Any],
        draft: Draft | None = None,
        others: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Write a checkpoint, which is complete or not there. Remove incomplete ones that killed processes have left.

        ``about`` is plain data for the manifest. ``draft`` is what ``begin`` returned, if several ranks write there;
        ``others`` waits for their files, and returns what the manifest says of them.
        """
        draft = draft or self.begin(step)
        try:
            with self.store.explained(f"checkpoint {self.store.shown(draft.name)} could not be written"):
                complete = self._sweep(draft.name)
                files = {**draft.write(parts), **others()}
                self.check()  # another job may have taken the folder meanwhile
                draft.complete(step, about, files)
        except CheckpointError:
            if isinstance(self.store, Disk):  # a server that has failed may not answer now: the next save removes it
                with suppress(OSError):
                    self.store.unmake(draft.name)
            raise
        if step in complete:
            with suppress(OSError):  # the next save tries it again
                self.store.unmake(complete[step])

    def _sweep(self, draft: str) -> dict[int, str]:
        """Remove incomplete checkpoints, but for the one that is being written. Return the complete ones."""
        names = [name for name in self._names() if name != draft]
        complete = self._complete(names)
        for name in names:
            if FOLDER.fullmatch(name) and name not in complete.values():
                with suppress(OSError):  # it only takes up space
                    self.store.unmake(name)
        return complete

    def remove(self, step: int) -> None:
        """Remove a checkpoint, at once as others see it."""
        for name in _of_step(step, self._names()):
            with self.store.explained(f"{self.store.shown(name)} can't be removed"):
                self.store.unmake(name)
            self._used.discard(name)

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


def _of_step(step: int, names: Iterable[str]) -> list[str]:
    """Return the names of a step's folders, the last one last."""
    of_step = (name for name in names if FOLDER.fullmatch(name) and name.partition(".")[0] == folder_name(step))
    return sorted(of_step, key=_attempt)


def _attempt(name: str) -> int:
    """Return how many times a step had been saved when this folder was written."""
    match = FOLDER.fullmatch(name)
    return int(match[2] or 1) if match else 0
