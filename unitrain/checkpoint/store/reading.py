"""Opens files and maps them, and says why one can't be read.

Files of torch that are mapped are read where their tensors are used, and give their memory back afterwards.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import re
import stat
import zipfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from unitrain.data.structure import tensors

_libc = ctypes.CDLL(None)
_MADV_DONTNEED = 4  # Linux: the pages are read from the file again if they are needed


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. A pipe would be waited for, and a device may be read for ever: both are refused.

    Raises:
        OSError: it can't be opened, or is a pipe, a socket or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(descriptor, "rb")


def reason(error: Exception) -> str:
    """Return why a file could not be written or read, without torch's advice to allow code in it."""
    if isinstance(error, pickle.UnpicklingError):
        kind = re.search(r"GLOBAL (\S+)", str(error))
        found = f"{kind[1]} is" if kind else "it contains an object that is"
        return f"{found} neither a tensor nor plain data (int, float, str, list, dict), and pickled code is never run."
    return f"{type(error).__name__}: {error}"


class MappedFiles:
    """Loads files, and releases their pages on demand. They stay mapped as long as this object lives."""

    def __init__(self) -> None:
        self._paths: set[str] = set()
        self._addresses: list[int] = []  # in files whose mappings have not been looked for yet
        self._ranges: set[tuple[int, int]] = set()
        # Where a file was mapped, something else may be: to release its pages would overwrite it by zeros.
        self._contents: list[Any] = []

    def load(self, path: Path) -> Any:
        """Return the content of a file of torch, with tensors on the CPU. Raises any exception of ``torch.load``."""
        with open_regular(path) as file:
            is_mappable = zipfile.is_zipfile(file)  # and not of a torch before 1.6
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mappable)
        if is_mappable:
            strided = [one for one in tensors(content) if one.layout == torch.strided and not one.is_meta]
            self._keep(path, content, [one.untyped_storage() for one in strided])
        return content

    def map(self, path: Path) -> torch.UntypedStorage:
        """Return the bytes of a file."""
        size = path.stat().st_size
        mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).untyped_storage()
        self._keep(path, mapped, [mapped])
        return mapped

    def _keep(self, path: Path, content: Any, storages: Iterable[torch.UntypedStorage]) -> None:
        self._contents.append(content)
        self._paths.add(str(path.resolve()))
        self._addresses += [storage.data_ptr() for storage in storages]

    def release(self) -> None:
        """Release the pages that have been read so far."""
        if self._addresses:
            # Once, and not for each file: the list of mappings grows with them.
            self._ranges.update(_mappings(self._paths, sorted(self._addresses)))
            self._addresses.clear()
        for start, end in self._ranges:
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def _mappings(paths: set[str], addresses: list[int]) -> Iterator[tuple[int, int]]:
    """Yield where files are mapped at one of these addresses, which are sorted.

    A script may have mapped a file itself, elsewhere, and have changed its copy.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        found, *fields = line.split(maxsplit=5)
        if fields[-1].removesuffix(" (deleted)") in paths:
            start, end = (int(address, 16) for address in found.split("-"))
            at = bisect_left(addresses, start)
            if at < len(addresses) and addresses[at] < end:
                yield start, end
