"""Writes the files of checkpoints: hashed, and on their way to the disk, while they are written."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from unitrain.checkpoint.mapped import MappedFiles

_HASHED_APART = 2**16  # bytes; to pass on fewer takes longer than to hash them
_WRITTEN_BACK = 2**24  # bytes; fewer are left for the sync at the end


def write_part(path: Path, value: Any, *, to_disk: bool = False) -> dict[str, Any]:
    """Write a file of a checkpoint, and return what its manifest says of it. Raises any exception of pickling.

    Args:
        path: the file, which is not synced to the disk.
        value: tensors and plain data.
        to_disk: have the kernel write it to the disk meanwhile, so that to sync it afterwards takes less time.
    """
    with ExitStack() as stack:
        # Before the file is closed, threads that use it end.
        file = stack.enter_context(open(path, "wb"))
        digest = _Digest(value, stack.enter_context(ThreadPoolExecutor(1, "checkpoint digest")))
        disk = _Disk(file, stack.enter_context(ThreadPoolExecutor(1, "checkpoint disk"))) if to_disk else None
        writing = _Writing(file, digest, disk)
        try:
            torch.save(value, writing)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise writing.error or error from error
        if disk is not None:
            disk.wait()
        described = {"size": writing.size, "sha256": digest.hexdigest()}
    # Report now, and not when it is needed, that a part can't be loaded. This does not read tensor data.
    MappedFiles().load(path)
    return described


class _Writing:
    """The file object that ``torch.save`` is given.

    Args:
        file: the file.
        digest: is updated with what is written.
        disk: is told how much was written.
    """

    def __init__(self, file: BinaryIO, digest: _Digest, disk: _Disk | None) -> None:
        self._file = file
        self._digest = digest
        self._disk = disk
        self.size = 0
        self.error: OSError | None = None
        """The error of a write, which torch's writer replaces by another."""

    def write(self, data: memoryview) -> int:
        self.size += len(data)
        hashed = self._digest.update(data)
        try:
            written = self._file.write(data)
            if self._disk is not None:
                self._disk.wrote(written)
        except OSError as error:
            self.error = error
            raise
        finally:
            if hashed is not None:
                hashed.result()
        return written

    def flush(self) -> None:
        self._file.flush()


class _Digest:
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
        self._thread.submit(self._update, self._small).result()
        return self._sha256.hexdigest()


class _Disk:
    """Has the kernel write to the disk what was written to a file.

    Args:
        file: the file.
        thread: waits for the disk.
    """

    def __init__(self, file: BinaryIO, thread: ThreadPoolExecutor) -> None:
        self._file = file
        self._thread = thread
        self._under_way: Future[None] | None = None
        self._since = 0

    def wrote(self, size: int) -> None:
        """Count bytes that were written, and start once they are many. Raises the OSError of the last time."""
        self._since += size
        if self._since < _WRITTEN_BACK or not (self._under_way is None or self._under_way.done()):
            return
        self.wait()
        self._under_way = self._thread.submit(os.fdatasync, self._file.fileno())
        self._since = 0

    def wait(self) -> None:
        """Wait for what is under way. Raises its OSError, which no later sync of the file reports again."""
        if self._under_way is not None:
            self._under_way.result()
