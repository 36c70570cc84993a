"""A folder of a file system as a ``Store``: files are written under a temporary name, synced, and renamed."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from unitrain.checkpoint.store.store import NAME, Store
from unitrain.errors import CheckpointError

_BLOCK = 2**20


class Disk(Store):
    """A folder on a disk, or on a file system that hosts share.

    If it is ``durable``, files are synced, so that they outlast a failure of the host.
    """

    def __init__(self, root: Path, *, durable: bool = True) -> None:
        self.root: Path = root
        self._durable = durable
        self._device: int | None = None  # of the folder, when it was made

    def __str__(self) -> str:
        return str(self.root)

    @property
    def location(self) -> str:
        return str(self.root.resolve())

    def list(self, folder: str = "") -> list[str]:
        return os.listdir(self.root / folder)

    def get(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        with open(self.root / name, "rb") as file:
            file.seek(start)
            return file.read(-1 if end is None else end - start)

    def put(self, name: str, content: bytes, *, exclusive: bool = False) -> None:
        if exclusive:
            with open(self.root / name, "xb") as file:  # to rename a draft would replace another process's file
                file.write(content)
        else:
            with self.draft(name) as draft:
                draft.write_bytes(content)

    def remove(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def modified(self, name: str) -> float:
        # Opened, a file is looked up again on the server of a network file system.
        with open(self.root / name, "rb") as file:
            return os.fstat(file.fileno()).st_mtime

    def size(self, name: str) -> int:
        return (self.root / name).stat().st_size

    def touch(self, name: str, content: bytes) -> None:
        os.utime(self.root / name)  # does not undo what another process has just written

    @contextmanager
    def draft(self, name: str) -> Iterator[Path]:
        path = self.root / name
        if path.exists() and not (path.is_file() or path.is_dir()):  # such as /dev/null, which a rename would replace
            raise CheckpointError(f"{path} is a device or a pipe: give the path of a file.")
        draft = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
        try:
            yield draft
            if draft.exists():
                self._sync(draft)
                os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    @contextmanager
    def file(self, name: str) -> Iterator[Path]:
        yield self.root / name

    def probe(self, needed: int) -> None:
        with self.explained(f"checkpoints can't be written to {self}"):
            self.make()
            with tempfile.TemporaryFile(dir=self.root) as file:
                file.write(bytes(_BLOCK))
                os.fsync(file.fileno())
            free = shutil.disk_usage(self.root).free
        if free < needed:
            raise CheckpointError(
                f"checkpoints can't be written to {self}: one needs at least {needed} bytes, but {free} bytes are "
                "free. Free some space, or use a folder on another disk."
            )

    def reason(self, error: Exception) -> str:
        if not isinstance(error, OSError):
            return super().reason(error)
        text = f"{error} in {self}"
        if error.errno == errno.ENOSPC:
            text += f", where {shutil.disk_usage(self.root).free} bytes are free. Earlier checkpoints are intact"
        return f"{text}. Correct that, or use another folder."

    def make(self, folder: str = "") -> None:
        """Make a folder. Raises CheckpointError rather than make one of another disk, below the mount."""
        there = next(path for path in (self.root, *self.root.absolute().parents) if path.exists())
        if self._device is not None and there.stat().st_dev != self._device:
            raise CheckpointError(
                f"the disk of {self} is no longer mounted: what is there now is on another. Mount it again, and resume "
                "the run."
            )
        (self.root / folder).mkdir(parents=True, exist_ok=True)
        self._device = self.root.stat().st_dev

    def unmake(self, folder: str) -> None:
        path = self.root / folder
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            (path / NAME).unlink(missing_ok=True)
            shutil.rmtree(path)

    def sync(self, folder: str) -> None:
        self._sync(self.root / folder)
        self._sync(self.root)

    def _sync(self, path: Path) -> None:
        if self._durable:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
