"""Writes the files of checkpoints, and hashes them meanwhile."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from unitrain.checkpoint.store.mapped import MappedFiles

_HASHED_APART = 2**16  # bytes; to pass on fewer takes longer than to hash them


def write_part(path: Path, value: Any, written: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Write a file of a checkpoint, and return what its manifest says of it. Raises any exception of pickling.

    Args:
        path: the file, which is not synced to the disk.
        value: tensors and plain data.
        written: called when the file is complete. It may not be hashed to its end yet, which takes longer.
    """
    with ThreadPoolExecutor(1, "checkpoint digest") as thread:
        digest = Digest(value, thread)
        with open(path, "wb") as file:
            writing = Writing(file, digest)
            _save(value, writing)
        written()
        return {"size": writing.size, "sha256": digest.hexdigest()}


def write_file(path: Path, value: Any) -> None:
    """Write a file that is not synced to the disk. Raises any exception of pickling."""
    with open(path, "wb") as file:
        _save(value, Writing(file, None))


def _save(value: Any, writing: Writing) -> None:
    try:
        torch.save(value, writing)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise writing.error or error from error


def check_part(path: Path) -> None:
    """Report now, and not when it is needed, that a part can't be loaded. This does not read the tensors' data."""
    MappedFiles().load(path)


class Writing:
    """The file object that ``torch.save`` is given.

    Args:
        file: the file.
        digest: is updated with what is written, unless it is None.
    """

    def __init__(self, file: BinaryIO, digest: Digest | None) -> None:
        self._file = file
        self._digest = digest
        self.size: int = 0
        self.error: OSError | None = None
        """The error of a write, which torch's writer replaces by another."""

    def write(self, data: memoryview) -> int:
        """Write data, which are hashed meanwhile."""
        self.size += len(data)
        hashed = None if self._digest is None else self._digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        finally:
            if hashed is not None:
                hashed.result()

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self.size

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Digest:
    """A SHA-256, computed by a thread while the data are written.

    Args:
        value: what the data are of. The memory of its tensors does not change.
        thread: computes.
    """

    def __init__(self, value: Any, thread: ThreadPoolExecutor) -> None:
        self._sha256 = hashlib.sha256()
        self._thread = thread
        self._small: list[bytes] = []
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.device.type == "cpu"]
        strided = [tensor for tensor in tensors if tensor.layout == torch.strided]
        self._lasting = {tensor.untyped_storage().data_ptr() for tensor in strided}

    def update(self, data: memoryview) -> Future[None] | None:
        """Add data. If a future is returned, their memory is used until it is done."""
        if len(data) < _HASHED_APART:
            self._small.append(bytes(data))
            return None
        future = self._thread.submit(self._update, [*self._small, data])
        self._small = []
        return None if np.frombuffer(data, np.uint8).ctypes.data in self._lasting else future

    def _update(self, pieces: Sequence[bytes | memoryview]) -> None:
        for piece in pieces:
            self._sha256.update(piece)

    def hexdigest(self) -> str:
        """Return the digest of what was written."""
        self._thread.submit(self._update, self._small).result()
        return self._sha256.hexdigest()
