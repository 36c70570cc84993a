"""Writes the files of checkpoints, and hashes them meanwhile."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from unitrain.checkpoint.store.mapped import MappedFiles
from unitrain.data.structure import tensors

_SMALL = 2**16  # bytes; to pass on fewer takes longer than to copy and hash them
_JOINED = 2**20


def write_part(path: Path, value: Any, written: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Write a file of a checkpoint with ``torch.save``. See ``write_hashed``."""
    return write_hashed(path, value, partial(torch.save, value), written)


def write_hashed(
    path: Path, value: Any, save: Callable[[Writing], object], written: Callable[[], object]
) -> dict[str, Any]:
    """Write a file, and return what its manifest says of it. Raises any exception of pickling.

    Args:
        path: the file, which is not synced to the disk.
        value: tensors and plain data. The memory of the tensors does not change.
        save: writes the value.
        written: called when the file is complete. It may not be hashed to its end yet, which takes longer.
    """
    with ThreadPoolExecutor(1, "checkpoint digest") as thread:
        digest = Digest(value, thread)
        size = _write(path, save, digest)
        written()
        return {"size": size, "sha256": digest.hexdigest()}


def write_file(path: Path, value: Any) -> None:
    """Write a file that is not synced to the disk. Raises any exception of pickling."""
    _write(path, partial(torch.save, value), None)


def _write(path: Path, save: Callable[[Writing], object], digest: Digest | None) -> int:
    with open(path, "wb") as file:
        writing = Writing(file, digest)
        try:
            save(writing)
        except RuntimeError as error:
            raise writing.error or error from error
        writing.end()
    return writing.size


def check_part(path: Path) -> None:
    """Report now, and not when it is needed, that a part can't be loaded. This does not read the tensors' data."""
    MappedFiles().load(path)


class Writing:
    """The file object that ``torch.save`` is given. It joins small writes, of which an archive has about 40."""

    def __init__(self, file: BinaryIO, digest: Digest | None) -> None:
        self._file = file
        self._digest = digest
        self._small = bytearray()
        self.size: int = 0
        self.error: OSError | None = None
        """The error of a write, which torch's writer replaces by another."""

    def write(self, data: memoryview) -> int:
        """Write data, which are hashed meanwhile."""
        size = len(data)
        self.size += size
        if size < _SMALL:
            self._small += data
        if size >= _SMALL or len(self._small) >= _JOINED:
            self.end()
        if size >= _SMALL:
            self._put(data)
        return size

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self.size

    def flush(self) -> None:
        """Do nothing: torch calls this after each archive."""

    def end(self) -> None:
        """Write what has been joined so far."""
        joined, self._small = self._small, bytearray()
        self._put(memoryview(joined))

    def _put(self, data: memoryview) -> None:
        hashed = None if self._digest is None else self._digest.update(data)
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        finally:
            if hashed is not None:
                hashed.result()


class Digest:
    """A SHA-256 of what is written of a value, computed by a thread. The memory of its tensors must not change."""

    def __init__(self, value: Any, thread: ThreadPoolExecutor) -> None:
        self._sha256 = hashlib.sha256()
        self._thread = thread
        found = (one for one in tensors(value) if one.device.type == "cpu" and one.layout == torch.strided)
        self._lasting = {tensor.untyped_storage().data_ptr() for tensor in found}

    def update(self, data: memoryview) -> Future[None] | None:
        """Add data. If a future is returned, their memory is used until it is done."""
        hashed = self._thread.submit(self._sha256.update, data)
        lasts = isinstance(data.obj, bytearray) or np.frombuffer(data, np.uint8).ctypes.data in self._lasting
        return None if lasts else hashed

    def hexdigest(self) -> str:
        """Return the digest of what was written."""
        return self._thread.submit(self._sha256.hexdigest).result()
