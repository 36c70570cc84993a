"""``WeightFiles`` in an object store, of which each rank downloads the rows that it needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unitrain.checkpoint.store.remote_files import RemoteFiles
from unitrain.checkpoint.weights.safetensors import INDEX, Stored, name_in, names_in_index, stored_in, tensor_of
from unitrain.checkpoint.weights.weight_files import digest
from unitrain.communication.streaming import Form
from unitrain.errors import CheckpointError

_BEGINNING = 2**20  # bytes, in which most headers fit: one request for each file


class RemoteWeights:
    """``WeightFiles`` in an object store.

    Args:
        names: URLs of the files.

    Raises:
        CheckpointError: the store can't be used.
    """

    piece_bytes: int = 2**25  # a request takes as long as a few MB

    def __init__(self, names: Sequence[str]) -> None:
        self.names: list[str] = list(names)
        folder, _, _ = self.names[0].rpartition("/")
        self._files = RemoteFiles(folder)
        self._beginnings: dict[str, tuple[int, bytes]] = {}
        self._stored: dict[str, tuple[str, Stored]] = {}

    @staticmethod
    def at(url: str) -> RemoteWeights:
        """Return the files at a URL. Raises CheckpointError."""
        url = url.rstrip("/")
        if not url.endswith((".safetensors", INDEX)):
            url = f"{url}/{name_in(RemoteFiles(url).names(), url)}"
        if not url.endswith(INDEX):
            return RemoteWeights([url])
        folder, _, name = url.rpartition("/")
        try:
            text = RemoteFiles(folder).read(name)
        except FileNotFoundError as error:
            raise CheckpointError(f"{url} does not exist.") from error
        return RemoteWeights([f"{folder}/{one}" for one in names_in_index(text, url)])

    def digests(self) -> list[str]:
        """See ``WeightFiles.digests``."""
        return [digest(*self._beginning(url)) for url in self.names]

    def forms(self) -> dict[str, Form]:
        """See ``WeightFiles.forms``."""
        return {
            name: Form(torch.empty(stored.shape, dtype=stored.dtype, device="meta"))
            for name, (_, stored) in self._opened().items()
        }

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """See ``WeightFiles.rows``."""
        file, stored = self._opened()[name]
        return self._read(file, stored.rows(start, end))

    def whole(self, name: str) -> Tensor:
        """See ``WeightFiles.whole``."""
        return self._read(*self._opened()[name])

    def release(self) -> None:
        """See ``WeightFiles.release``: nothing is kept."""

    def _opened(self) -> dict[str, tuple[str, Stored]]:
        if not self._stored:
            for url in self.names:
                size, beginning = self._beginning(url)

                def read(start: int, end: int, url: str = url, beginning: bytes = beginning) -> bytes:
                    return beginning[start:end] if end <= len(beginning) else self._bytes(url, start, end)

                self._stored.update((name, (url, one)) for name, one in stored_in(read, size, url).items())
            self._beginnings.clear()
        return self._stored

    def _beginning(self, url: str) -> tuple[int, bytes]:
        if url not in self._beginnings:
            try:
                size = self._files.size(url.rpartition("/")[2])
            except FileNotFoundError as error:
                raise CheckpointError(f"{url} does not exist.") from error
            self._beginnings[url] = size, self._bytes(url, 0, min(size, _BEGINNING))
        return self._beginnings[url]

    def _read(self, url: str, stored: Stored) -> Tensor:
        raw = bytearray(self._bytes(url, stored.start, stored.end))
        if len(raw) != stored.end - stored.start:
            raise CheckpointError(f"{url} has changed or was cut while it was read.")
        return tensor_of(torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8), stored)

    def _bytes(self, url: str, start: int, end: int) -> bytes:
        if start == end:
            return b""
        try:
            return self._files.read_range(url.rpartition("/")[2], start, end)
        except FileNotFoundError as error:
            raise CheckpointError(f"{url} does not exist.") from error
