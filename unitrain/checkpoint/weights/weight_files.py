"""The files of safetensors with a model's weights, as one rank reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from unitrain.checkpoint.weights.mapped import MappedFiles
from unitrain.checkpoint.weights.safetensors import files_at, tensors_in
from unitrain.communication.streaming import BUFFER_BYTES, Form

_DIGESTED = 2**20  # bytes at the beginning of a file


class WeightFiles(Protocol):
    """Files, which are read when their tensors are."""

    piece_bytes: int
    """How much to read of a tensor at a time."""
    names: list[str]
    """Paths or URLs of the files."""

    def digests(self) -> list[str]:
        """Return a digest of the size and of the beginning of each file. Raises CheckpointError."""

    def forms(self) -> dict[str, Form]:
        """Return the forms of the tensors, by name. Raises CheckpointError."""

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Return some rows of a tensor. Raises CheckpointError."""

    def whole(self, name: str) -> Tensor:
        """Return a tensor. Raises CheckpointError."""

    def release(self) -> None:
        """Give back the memory of what has been read."""


class LocalWeights:
    """``WeightFiles`` on a disk, which are mapped.

    Args:
        names: paths of the files.
    """

    piece_bytes: int = BUFFER_BYTES

    def __init__(self, names: Sequence[str]) -> None:
        self.names: list[str] = list(names)
        self._mapped = MappedFiles()
        self._tensors: dict[str, Tensor] = {}

    @staticmethod
    def at(path: Path) -> LocalWeights:
        """Return the files at a path. Raises CheckpointError."""
        return LocalWeights(list(map(str, files_at(path))))

    def digests(self) -> list[str]:
        """See ``WeightFiles.digests``."""
        found = []
        for path in map(Path, self.names):
            try:
                with open(path, "rb") as file:
                    found.append(digest(path.stat().st_size, file.read(_DIGESTED)))
            except OSError:
                found.append("")
        return found

    def forms(self) -> dict[str, Form]:
        """See ``WeightFiles.forms``."""
        return {name: Form(tensor) for name, tensor in self._opened().items()}

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """See ``WeightFiles.rows``."""
        return self._opened()[name][start:end]

    def whole(self, name: str) -> Tensor:
        """See ``WeightFiles.whole``."""
        return self._opened()[name]

    def release(self) -> None:
        """See ``WeightFiles.release``."""
        self._mapped.release()

    def _opened(self) -> dict[str, Tensor]:
        if not self._tensors:
            for path in map(Path, self.names):
                self._tensors.update(tensors_in(path, self._mapped))
        return self._tensors


def digest(size: int, beginning: bytes) -> str:
    """Return a digest of a file, which differs from that of other weights: it covers the header."""
    return hashlib.sha256(f"{size} ".encode() + beginning[:_DIGESTED]).hexdigest()
