"""The checkpoints of a run in a folder of a file system."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from unitrain.checkpoint.sharded.shards import PREFIX
from unitrain.checkpoint.sharded.verifying import JointVerification
from unitrain.checkpoint.store import manifest as manifests
from unitrain.checkpoint.store import storage
from unitrain.checkpoint.store.folder import RUN_ID, Begun, NotACheckpointError, Others, Saved
from unitrain.checkpoint.store.lock import FolderLock
from unitrain.checkpoint.store.manifest import Manifest
from unitrain.checkpoint.weights.mapped import MappedFiles
from unitrain.errors import CheckpointError


class BegunOnDisk:
    """A ``Begun`` on a file system that all ranks see.

    Args:
        folder: its temporary folder, which rank 0 has made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def place(self) -> list[str]:
        """See ``Begun.place``."""
        return [str(self._folder)]

    def is_ready(self) -> bool:
        """See ``Begun.is_ready``: the folder is there already."""
        return True

    def write(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """See ``Begun.write``."""
        return storage.write_files(self._folder, parts)

    def tell(self, rank: int, said: str) -> None:
        """See ``Begun.tell``."""
        description = self._description(rank)
        temporary = description.with_suffix(".tmp")
        temporary.write_text(said)
        os.replace(temporary, description)

    def told(self, rank: int) -> str | None:
        """See ``Begun.told``."""
        try:
            said = self._description(rank).read_text()
        except FileNotFoundError:
            return None
        self._description(rank).unlink()
        return said

    def give_up(self) -> None:
        """See ``Begun.give_up``: nobody waits."""

    def _description(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.json"


class LocalFolder:
    """A ``Folder`` on a disk, or on a file system that hosts share.

    Args:
        root: the folder; it is created by ``claim``.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock: FolderLock | None = None

    def __str__(self) -> str:
        return str(self._root)

    def claim(self, needed: int) -> None:
        """See ``Folder.claim``."""
        storage.probe(self._root, needed)
        self._lock = FolderLock(self._root)

    def check(self) -> None:
        """See ``Folder.check``."""
        if self._lock is not None:
            self._lock.check()

    def release(self) -> None:
        """See ``Folder.release``."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def name(self, step: int) -> str:
        """See ``Folder.name``."""
        return str(storage.folder_of(self._root, step))

    def steps(self) -> list[int]:
        """See ``Folder.steps``."""
        return [storage.step_of(folder) for folder in storage.found(self._root)]

    def recover(self) -> None:
        """See ``Folder.recover``."""
        storage.recover(self._root)

    def begin(self, step: int) -> BegunOnDisk:
        """See ``Folder.begin``."""
        self.check()
        storage.sweep(self._root)
        return BegunOnDisk(storage.begin(self._root.resolve(), step))

    def join(self, place: Sequence[str]) -> BegunOnDisk | None:
        """See ``Folder.join``."""
        (folder,) = map(Path, place)
        return BegunOnDisk(folder) if folder.is_dir() else None

    def write(
        self,
        step: int,
        parts: Mapping[str, Any],
        about: Mapping[str, Any],
        begun: Begun | None = None,
        others: Others = dict,
    ) -> None:
        """See ``Folder.write``."""
        if begun is None:
            storage.sweep(self._root)
        temporary = None if begun is None else Path(*begun.place)
        storage.write(self._root, step, parts, about, begun=temporary, others=others)

    def manifest(self, step: int) -> Manifest:
        """See ``Folder.manifest``."""
        return manifests.read(storage.folder_of(self._root, step))

    def open(self, step: int, joint: JointVerification | None = None) -> Saved:
        """See ``Folder.open``."""
        return _opened(storage.folder_of(self._root, step), joint)

    def take(self, step: int, source: Path) -> None:
        """See ``Folder.take``."""
        storage.take(self._root, step, source)

    def run_id(self, *, make: bool) -> str | None:
        """See ``Folder.run_id``."""
        file = self._root / RUN_ID
        try:
            if make and not file.exists():
                file.write_text(uuid4().hex)
            return file.read_text()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} can't be read or written: {error}") from error

    def forget_run(self) -> None:
        """See ``Folder.forget_run``."""
        try:
            (self._root / RUN_ID).unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self._root / RUN_ID} can't be removed: {error}") from error

    def remove(self, step: int) -> None:
        """See ``Folder.remove``."""
        storage.discard(storage.folder_of(self._root, step))

    def point_to_best(self, step: int | None) -> None:
        """See ``Folder.point_to_best``."""
        storage.point_to_best(self._root, step)


def checkpoint_in(folder: Path, joint: JointVerification | None = None) -> Saved:
    """Verify and open the checkpoint in a folder, all files on this rank unless ``joint`` is given.

    Raises:
        NotACheckpointError: there is none.
        DamagedError: a file of it is missing or changed.
    """
    if not os.path.lexists(folder):
        raise NotACheckpointError("does not exist")
    if not os.path.lexists(folder / storage.MANIFEST):
        inside = next(storage.found(folder), None)
        raise NotACheckpointError(
            "is no checkpoint" if inside is None else f"contains checkpoints, such as {inside.name}, but is none itself"
        )
    return _opened(folder, joint)


def _opened(folder: Path, joint: JointVerification | None) -> Saved:
    manifest = storage.verify(folder, storage.verify_files if joint is None else joint)
    if joint is None or joint.shards is None:
        files = MappedFiles()
        return Saved.of(manifest, storage.read(folder, manifest.files, files), files, str(folder))
    whole = storage.read(folder, [name for name in manifest.files if not name.startswith(PREFIX)], joint.files)
    return Saved.of(manifest, {**whole, **joint.shards.contents()}, joint.files, str(folder))
