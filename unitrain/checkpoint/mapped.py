"""Gives back the memory of files that are mapped, while they are read."""

from __future__ import annotations

import ctypes
from pathlib import Path

_libc = ctypes.CDLL(None)
_MADV_DONTNEED = 4  # Linux: the pages are read from the file again if they are needed


class Mapped:
    """The files of a folder that this process has mapped so far.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path) -> None:
        inside = f"{folder.resolve()}/"
        self._ranges: list[tuple[int, int]] = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, *_, name = line.split(maxsplit=5)
            if name.startswith(inside):
                start, end = (int(address, 16) for address in addresses.split("-"))
                self._ranges.append((start, end - start))

    def release(self) -> None:
        """Release the pages that have been read."""
        for start, length in self._ranges:
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED)
