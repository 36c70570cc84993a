"""Files of torch: hashed while they are written, and mapped when they are read.

Mapped files are read where their tensors are used, and give their memory back afterwards.
"""

from __future__ import annotations

import copy
import ctypes
import errno
import hashlib
import io
import mmap
import os
import pickle
import re
import stat
import zipfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from unitrain.communication.structure import tensors

_libc = ctypes.CDLL(None)
_MADV_DONTNEED = 4  # Linux: the pages are read from the file again if they are needed
_PAGE = mmap.PAGESIZE
_SMALL = 2**16  # bytes; to wake up a thread for fewer takes longer than to hash them
_BUFFERED = 2**20  # of small writes, of which an archive has about 40


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. A pipe would be waited for, and a device may be read for ever: both are refused."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(descriptor, "rb")


def reason(error: Exception) -> str:
    """Return why a file could not be written or read, without torch's advice to allow code in it."""
    if isinstance(error, UnwritableError):
        return str(error)
    if isinstance(error, pickle.UnpicklingError):
        kind = re.search(r"GLOBAL (\S+)", str(error))
        thing = f"{kind[1]} is" if kind else "it contains an object that is"
        return f"{thing} neither a tensor nor plain data (int, float, str, list, dict), and pickled code is never run."
    return f"{type(error).__name__}: {error}"


class UnwritableError(Exception):
    """An object can't be in a file. The message says where it is, and why."""


def refusal(name: str, value: Any, error: Exception) -> Exception:
    """Return why nested values can't be written, with the place of the object, or the same error."""
    where = _not_plain(value)
    if where is None:
        return error
    *keys, kind = where
    place = "".join(f"[{key!r}]" for key in keys)
    remedy = " Give it a class as its factory, as in defaultdict(list)." if kind is defaultdict else ""
    return UnwritableError(f"{name}{place} is a {kind.__name__}: {reason(error)}{remedy}")


def _not_plain(value: Any) -> list[Any] | None:
    """Return the keys that lead to the first object that can't be in a file, and its class, or None."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in items:
        where = _not_plain(item)
        if where is not None:
            return [key, *where]
    if isinstance(value, Tensor):
        return None
    content = io.BytesIO()
    try:
        if isinstance(value, dict):
            value = copy.copy(value)
            value.clear()
        if type(value) is not list:
            torch.save(value, content)
            torch.load(io.BytesIO(content.getvalue()), weights_only=True)
    except Exception:  # pickling may raise any exception
        return [type(value)]
    return None


def plain(value: Any) -> Any:
    """Return nested values with numbers of Python in place of NumPy's scalars."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        made = copy.copy(value)  # of the same class
        made.clear()
        for key, item in value.items():
            made[plain(key)] = plain(item)
        return made
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def viewed(raw: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return a tensor, given its bytes: in place, if they are aligned."""
    if raw.data_ptr() % dtype.itemsize or raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(shape)


class MappedFiles:
    """Loads files, and releases their pages on demand. They stay mapped as long as this object lives."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # of whole pages: their address, and how many bytes
        # Where a file was mapped, something else may be: to release its pages would overwrite it by zeros.
        self._contents: list[Any] = []

    def load(self, path: Path) -> Any:
        """Return the content of a file of torch, with tensors on the CPU. Raises any exception of ``torch.load``."""
        with open_regular(path) as file:
            is_mappable = zipfile.is_zipfile(file)  # and not of a torch before 1.6
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mappable)
        if is_mappable:
            strided = [value for value in tensors(content) if value.layout == torch.strided and not value.is_meta]
            self._keep(path, content, [value.untyped_storage() for value in strided])
        return content

    def map(self, path: Path) -> torch.UntypedStorage:
        """Return the bytes of a file."""
        size = path.stat().st_size
        mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).untyped_storage()
        self._keep(path, mapped, [mapped])
        return mapped

    def _keep(self, path: Path, content: Any, storages: Iterable[torch.UntypedStorage]) -> None:
        """Keep a file mapped that has these storages."""
        self._contents.append(content)
        spans = [(part.data_ptr(), part.data_ptr() + part.nbytes()) for part in storages if part.nbytes()]
        start = -(-min((first for first, _ in spans), default=0) // _PAGE) * _PAGE
        end = max((last for _, last in spans), default=0) // _PAGE * _PAGE
        if 0 < end - start <= path.stat().st_size:  # else they are not all in the file
            self._ranges.append((start, end - start))

    def release(self) -> None:
        """Release the pages that have been read so far."""
        for start, size in self._ranges:
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_DONTNEED)


def write_part(
    path: Path,
    value: Any,
    written: Callable[[], object],
    save: Callable[..., object] = torch.save,
) -> dict[str, Any]:
    """Write a file of a checkpoint. Return its entry in the manifest. Raises any exception of pickling.

    Args:
        path: the file, which is not synced to the disk.
        value: tensors and plain data. The tensors do not change meanwhile.
        written: called when the file is complete. The rest of it is hashed at the same time.
        save: writes the value.
    """
    with ThreadPoolExecutor(1, "checkpoint digest") as thread:
        digest = _Digest(value, thread)
        with open(path, "wb", _BUFFERED) as file:
            output = _Output(file, digest)
            try:
                save(value, output)
            except RuntimeError as error:
                raise output.error or error from error
            size = file.tell()
        written()
        return {"size": size, "sha256": digest.result()}


class _Digest:
    """Hashes a file in a background thread while it is written."""

    def __init__(self, value: Any, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._sha256 = hashlib.sha256()
        self._left: deque[bytes | memoryview] = deque()
        on_cpu = (part for part in tensors(value) if part.device.type == "cpu" and part.layout == torch.strided)
        # Where torch passes on the memory of these, it need not wait until that is hashed: it does not change.
        self._lasting = {part.untyped_storage().data_ptr() for part in on_cpu}

    def update(self, data: bytes | memoryview) -> Future[None] | None:
        """Start to hash data. Return a future to wait for before their memory is used again, if it may be."""
        is_large = len(data) >= _SMALL
        self._left.append(data if is_large else bytes(data))
        hashing = self._thread.submit(self._hash) if is_large else None
        return None if np.frombuffer(data, np.uint8).ctypes.data in self._lasting else hashing

    def _hash(self) -> None:
        while self._left:
            self._sha256.update(self._left.popleft())

    def result(self) -> str:
        """Return the digest of all data."""
        self._thread.submit(self._hash).result()
        return self._sha256.hexdigest()


class _Output:
    """The file object that ``torch.save`` is given. It keeps the error of a write, which torch replaces by another."""

    def __init__(self, file: BinaryIO, digest: _Digest) -> None:
        self._file = file
        self._digest = digest
        self.error: OSError | None = None
        self.tell: Callable[[], int] = file.tell

    def write(self, data: bytes | memoryview) -> int:
        """Write data, which are hashed meanwhile."""
        hashing = self._digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        finally:
            if hashing is not None:
                hashing.result()

    def flush(self) -> None:
        """Do nothing: torch calls this after each archive."""
