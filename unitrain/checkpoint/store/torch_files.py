"""Files of torch: hashed while they are written, and mapped when they are read.

Mapped files are read where their tensors are used, and give their memory back afterwards.
"""

from __future__ import annotations

import copy
import ctypes
import io
import mmap
import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options
from xxhash import xxh3_128

from unitrain.communication.structure import tensors

_libc = ctypes.CDLL(None)
_PAGE = mmap.PAGESIZE
BLOCK = 2**20  # bytes that are read or written and then hashed, while they are in the processor's cache
_BUFFERED = 2**16  # of small writes, of which an archive has about 40


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
    misfit = _misfit(name, value)
    return UnwritableError(f"{misfit}: {reason(error)}") if misfit else error


def _misfit(place: str, value: Any) -> str:
    """Return where the first object is that can't be in a file, and its class; "" if there is none."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in items:
        if misfit := _misfit(f"{place}[{key!r}]", item):
            return misfit
    content = io.BytesIO()
    try:
        if isinstance(value, dict):
            value = copy.copy(value)
            value.clear()
        if not isinstance(value, Tensor) and type(value) is not list:
            torch.save(value, content)
            torch.load(io.BytesIO(content.getvalue()), weights_only=True)
    except Exception:  # pickling may raise any exception
        return f"{place} is a {type(value).__name__}"
    return ""


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
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
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
        """Release the pages that have been read so far. They are read from the file again if they are needed."""
        for start, size in self._ranges:
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def save_without_crc(value: Any, file: BinaryIO) -> None:
    """Write as ``torch.save`` does, without CRC-32, which ``torch.load`` never reads: for a file that has a digest."""
    # The option is this thread's; in older versions of torch, all threads': only who has changed it changes it back.
    changes = get_crc32_options()
    try:
        if changes:
            set_crc32_options(False)
        torch.save(value, file)
    finally:
        if changes:
            set_crc32_options(True)


def write_part(path: Path, save: Callable[[BinaryIO], object]) -> dict[str, Any]:
    """Write a file of a checkpoint with ``save``. Return its entry in the manifest. Raises any exception of pickling.

    The file is not synced to the disk.
    """
    hashed = _Hashed(path)
    with io.BufferedWriter(hashed, _BUFFERED) as file:
        try:
            save(file)
        except RuntimeError as error:
            raise hashed.error or error from error
    return {"size": path.stat().st_size, "xxh3": hashed.digest.hexdigest()}


class _Hashed(io.FileIO):
    """A file that is hashed while it is written. It keeps the error of a write, which torch replaces by another."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self.digest: xxh3_128 = xxh3_128()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write the beginning of data, so much that it can be hashed from the processor's cache."""
        try:
            written = super().write(data[:BLOCK])
        except OSError as error:
            self.error = error
            raise
        self.digest.update(data[:written])
        return written
