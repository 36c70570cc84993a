"""Files of torch that are mapped: they are read where their tensors are used, and give their memory back afterwards."""

from __future__ import annotations

import ctypes
import zipfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from unitrain.checkpoint.store.reading import open_regular
from unitrain.data.structure import tensors

_libc = ctypes.CDLL(None)
_MADV_DONTNEED = 4  # Linux: the pages are read from the file again if they are needed


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
