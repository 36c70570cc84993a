"""An object store, or anything else that fsspec knows by a URL, as a ``Store``, with errors that name a remedy.

An object is replaced at once and as a whole, also by an upload in several parts. Objects can't be renamed.
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.exceptions import FSTimeoutError

from unitrain.checkpoint.store.store import NAME, Store
from unitrain.errors import CheckpointError

PATIENCE_S = 120.0
"""How long a server is waited for that does not answer. s3fs has no limit for a PUT that was not accepted."""
_SLOWEST = 2**17  # bytes per second of a copy
_EACH_WRITE_IS_A_COMMIT = ("hf",)


class Objects(Store):
    """The files below a URL. Retries are those of the library behind fsspec, which is loaded when it is first used."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self.few_writes: bool = url.partition("://")[0].lower() in _EACH_WRITE_IS_A_COMMIT

    def __str__(self) -> str:
        return self._url

    @property
    def location(self) -> str:
        return self._url

    @cached_property
    def _connected(self) -> tuple[Any, str]:
        """The file system of fsspec, and the path of the root in it."""
        with self.explained(f"{self} can't be used"):
            try:
                files, root = url_to_fs(self._url)
            except ImportError as error:
                raise CheckpointError(f"{self} needs a library: {error}.") from error
        return files, str(root).rstrip("/")

    def list(self, folder: str = "") -> list[str]:
        with self.explained(f"{self.shown(folder)} can't be listed", FileNotFoundError):
            self._files.invalidate_cache()  # another process may have written files
            paths = self._files.ls(self._path(folder), detail=False, **self._limit())
            return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def get(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        part = {"start": start or None, "end": end}
        with self.explained(f"{self.shown(name)} could not be read", FileNotFoundError):
            return bytes(self._files.cat_file(self._path(name), **part, **self._limit((end or start) - start)))

    def put(self, name: str, content: bytes, *, exclusive: bool = False) -> None:
        mode, passes = ("create", FileExistsError) if exclusive else ("overwrite", CheckpointError)
        with self.explained(f"{self.shown(name)} could not be written", passes):
            self._files.pipe_file(self._path(name), content, mode=mode, **self._limit())

    def remove(self, name: str) -> None:
        with self.explained(f"{self.shown(name)} can't be removed"), suppress(FileNotFoundError):
            self._files.rm_file(self._path(name), **self._limit())

    def unmake(self, folder: str) -> None:
        with suppress(FileNotFoundError):
            for name in sorted(self.list(folder), key=lambda name: name != NAME):
                self.remove(f"{folder}/{name}")

    def modified(self, name: str) -> float:
        with self.explained(f"{self.shown(name)} could not be read", FileNotFoundError):
            self._files.invalidate_cache()
            return float(self._files.modified(self._path(name)).timestamp())

    def size(self, name: str) -> int:
        with self.explained(f"{self.shown(name)} could not be read", FileNotFoundError):
            self._files.invalidate_cache()
            return int(self._files.info(self._path(name), **self._limit())["size"])

    @contextmanager
    def draft(self, name: str) -> Iterator[Path]:
        with _temporary(name) as file:
            yield file
            with self.explained(f"{self.shown(name)} could not be written"):
                self._files.put_file(str(file), self._path(name), **self._limit(file.stat().st_size))

    @contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """Download a file. A mapped file stays on the disk, but without a name."""
        size = self.size(name)
        with _temporary(name) as file:
            with self.explained(f"{self.shown(name)} could not be read", FileNotFoundError):
                self._files.get_file(self._path(name), str(file), **self._limit(size))
            yield file

    def probe(self, needed: int) -> None:
        """Look at it once."""
        with suppress(FileNotFoundError):
            self.list()

    @property
    def _files(self) -> Any:
        return self._connected[0]

    def _path(self, name: str) -> str:
        root = self._connected[1]
        return f"{root}/{name}" if name else root

    def _limit(self, size: int = 0) -> dict[str, float]:
        """Return the time limit of a call that copies ``size`` bytes, for libraries that have one."""
        return {"timeout": PATIENCE_S + size / _SLOWEST} if self._files.async_impl else {}

    def reason(self, error: Exception) -> str:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            folder = tempfile.gettempdir()
            return f"No space left in {folder}, for temporary files. Free some, or set TMPDIR to a folder elsewhere."
        if isinstance(error, FSTimeoutError):
            return f"the server has not answered, or was slower than {_SLOWEST} bytes/s after {PATIENCE_S:g} s."
        return super().reason(error)


@contextmanager
def _temporary(name: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="unitrain-") as folder:
        yield Path(folder, name.rpartition("/")[2])
