"""The files with shards of one checkpoint, as one rank sees them: on a disk, or what it has downloaded of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from unitrain.checkpoint.manifest import Described
from unitrain.checkpoint.mapped import MappedFiles
from unitrain.checkpoint.shards import Content, lengths

if TYPE_CHECKING:
    from unitrain.checkpoint.remote_files import RemoteFiles


class ShardFiles(Protocol):
    """The files, in the order of the ranks that wrote them."""

    def contents(self) -> list[Content]:
        """Return the content of each file. Tensors are read when they are used."""

    def fetch(self, numbers: Iterable[int]) -> None:
        """Have the content of these files here. Raises DamagedError or CheckpointError."""


class LocalShards:
    """``ShardFiles`` on a disk.

    Args:
        paths: the files.
        mapped: maps them.

    Attributes:
        paths: as given.
    """

    def __init__(self, paths: Sequence[Path], mapped: MappedFiles) -> None:
        self.paths = paths
        self._mapped = mapped
        self._contents: list[Content] | None = None

    def contents(self) -> list[Content]:
        """See ``ShardFiles.contents``."""
        if self._contents is None:
            self._contents = [self._mapped.load(path) for path in self.paths]
        return self._contents

    def fetch(self, numbers: Iterable[int]) -> None:
        """See ``ShardFiles.fetch``: all are here."""


class RemoteShards:
    """``ShardFiles`` in an object store. Those that this rank needs are downloaded to files without names.

    Args:
        files: those of the checkpoint.
        described: the files with shards, by name.
        mapped: maps what has been downloaded.

    Attributes:
        rows: of the files that other ranks have downloaded, the numbers of rows, by number of the file.
    """

    def __init__(self, files: RemoteFiles, described: Mapping[str, Described], mapped: MappedFiles) -> None:
        self._files = files
        self._described = sorted(described.items())
        self._mapped = mapped
        self._own: dict[int, Content] = {}
        self.rows: dict[int, Content] = {}

    def contents(self) -> list[Content]:
        """See ``ShardFiles.contents``."""
        return [self._own.get(number) or self.rows[number] for number in range(len(self._described))]

    def fetch(self, numbers: Iterable[int]) -> None:
        """See ``ShardFiles.fetch``."""
        from unitrain.checkpoint.download import download  # and fsspec

        new = {number: self._described[number] for number in sorted(set(numbers) - self._own.keys())}
        found = download(self._files, dict(new.values()), self._mapped)
        self._own.update((number, found[name.removesuffix(".pt")]) for number, (name, _) in new.items())

    def own_rows(self) -> dict[int, Content]:
        """Return the numbers of rows in the files that are here, by number of the file."""
        return {number: lengths(content) for number, content in self._own.items()}
