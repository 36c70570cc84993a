"""The files of safetensors with a model's weights, in a folder or in an object store, as one rank reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.located import store_at
from unitrain.checkpoint.store.store import Store
from unitrain.checkpoint.store.torch_files import MappedFiles
from unitrain.checkpoint.weights.safetensors import INDEX, Stored, name_in, names_in_index, stored_in, tensor_of
from unitrain.communication.streaming import BUFFER_BYTES, Form
from unitrain.errors import CheckpointError

_BEGINNING = 2**20  # bytes, in which most headers fit: one request for each file
_REQUEST = 2**25  # bytes: a request takes as long as a few MB


class WeightFiles:
    """Files, which are read when their tensors are. Each rank reads the rows that it needs.

    Args:
        store: the folder of the files.
        names: their names in it.

    Attributes:
        store: as given.
        names: as given.
        piece_bytes: how much to read of a tensor at a time.
    """

    def __init__(self, store: Store, names: Sequence[str]) -> None:
        self.store: Store = store
        self.names: list[str] = list(names)
        self.piece_bytes: int = BUFFER_BYTES if isinstance(store, Disk) else _REQUEST
        self._mapped = MappedFiles()
        self._contents: dict[str, Tensor] = {}  # of files on a disk
        self._beginnings: dict[str, tuple[int, bytes]] = {}
        self._found: dict[str, tuple[str, Stored]] = {}

    @staticmethod
    def at(place: Path | str) -> WeightFiles:
        """Return the files of a model: the one at a path or URL, or in a folder there, or those that an index names.

        Raises CheckpointError if no file was found, or the index is invalid.
        """
        if isinstance(place, Path):
            store, name = (store_at(place), "") if place.is_dir() else (store_at(place.parent), place.name)
        elif place.rstrip("/").endswith((".safetensors", INDEX)):
            folder, _, name = place.rstrip("/").rpartition("/")
            store = store_at(folder)
        else:
            store, name = store_at(place), ""
        if not name:
            names: list[str] = []
            with _readable(str(store)), suppress(FileNotFoundError):
                names = store.list()
            name = name_in(names, str(store))
        if not name.endswith(INDEX):
            return WeightFiles(store, [name])
        with _readable(store.shown(name)):
            text = store.get(name)
        return WeightFiles(store, names_in_index(text, store.shown(name)))

    def digests(self) -> list[str]:
        """Return a digest of each file's size and beginning, which has its header. Raises CheckpointError."""
        beginnings = map(self._beginning, self.names)
        return [hashlib.sha256(f"{size} ".encode() + beginning).hexdigest() for size, beginning in beginnings]

    def forms(self) -> dict[str, Form]:
        """Return the forms of the tensors, by name. Raises CheckpointError."""
        return {
            name: Form(torch.empty(stored.shape, dtype=stored.dtype, device="meta"))
            for name, (_, stored) in self._stored().items()
        }

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Return some rows of a tensor. Raises CheckpointError."""
        file, stored = self._stored()[name]
        return self._read(file, stored.rows(start, end))

    def whole(self, name: str) -> Tensor:
        """Return a tensor. Raises CheckpointError."""
        return self._read(*self._stored()[name])

    def release(self) -> None:
        """Give back the memory of what has been read."""
        self._mapped.release()

    def _stored(self) -> dict[str, tuple[str, Stored]]:
        """Return the file that each tensor is in, and where."""
        if not self._found:
            for file in self.names:
                size, beginning = self._beginning(file)

                def read(start: int, end: int, file: str = file, beginning: bytes = beginning) -> bytes:
                    return beginning[start:end] if end <= len(beginning) else self._bytes(file, start, end)

                found = stored_in(read, size, self.store.shown(file))
                self._found.update((name, (file, stored)) for name, stored in found.items())
            self._beginnings.clear()
        return self._found

    def _beginning(self, file: str) -> tuple[int, bytes]:
        """Return the size of a file, and its first bytes."""
        if file not in self._beginnings:
            with _readable(self.store.shown(file)):
                size = self.store.size(file)
            self._beginnings[file] = size, self._bytes(file, 0, min(size, _BEGINNING))
        return self._beginnings[file]

    def _read(self, file: str, stored: Stored) -> Tensor:
        if isinstance(self.store, Disk):  # mapped, so that it is read when it is used
            if file not in self._contents:
                self._contents[file] = torch.empty(0, dtype=torch.uint8).set_(self._mapped.map(self.store.root / file))
            raw = self._contents[file][stored.start : stored.end]
        else:
            content = bytearray(self._bytes(file, stored.start, stored.end))
            raw = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        if raw.numel() != stored.end - stored.start:
            raise CheckpointError(f"{self.store.shown(file)} has changed or was cut while it was read.")
        return tensor_of(raw, stored)

    def _bytes(self, file: str, start: int, end: int) -> bytes:
        with _readable(self.store.shown(file)):
            return self.store.get(file, start, end) if start < end else b""


@contextmanager
def _readable(shown: str) -> Iterator[None]:
    """Raise errors of reading as CheckpointError."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{shown} does not exist.") from error
    except OSError as error:
        raise CheckpointError(f"{shown} could not be read: {error.strerror or error}.") from error
