"""Files of torch that are mapped: they are read where their tensors are used, and give their memory back afterwards."""

from __future__ import annotations

import ctypes
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from unitrain.checkpoint.reading import open_regular

_libc = ctypes.CDLL(None)
_MADV_DONTNEED = 4  # Linux: the pages are read from the file again if they are needed


class MappedFiles:
    """Loads files, and releases their pages on demand."""

    def __init__(self) -> None:
        self._ranges: set[tuple[int, int]] = set()

    def load(self, path: Path) -> Any:
        """Return the content of a file of torch, with tensors on the CPU. Raises any exception of ``torch.load``."""
        with open_regular(path) as file:
            is_mappable = zipfile.is_zipfile(file)  # and not of a torch before 1.6
        with self._mapping(path):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mappable)

    def map(self, path: Path) -> torch.UntypedStorage:
        """Return the bytes of a file."""
        with self._mapping(path):
            size = path.stat().st_size
            return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).untyped_storage()

    @contextmanager
    def _mapping(self, path: Path) -> Iterator[None]:
        before = _mappings(path)
        yield
        self._ranges |= _mappings(path) - before  # the script may have mapped the file itself, and changed its copy

    def release(self) -> None:
        """Release the pages that have been read so far."""
        for start, end in self._ranges:
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def _mappings(path: Path) -> set[tuple[int, int]]:
    """Return the addresses at which this process has mapped a file."""
    resolved = str(path.resolve())
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *fields = line.split(maxsplit=5)
        if fields[-1] == resolved:
            start, end = (int(address, 16) for address in addresses.split("-"))
            found.add((start, end))
    return found
