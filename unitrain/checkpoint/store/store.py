"""``Store``: the verbs on which everything about checkpoints is built, for a disk and for an object store alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar


class Store(ABC):
    """Files below a path or a URL, by names relative to it. Its string is the path or the URL.

    A file is replaced at once and as a whole: readers see the old one or the new one.

    A missing file is a FileNotFoundError, and one that exists, where it must not, a FileExistsError. Any other error is
    an OSError of a disk; of an object store it is a CheckpointError, which says what to do.
    """

    renames: ClassVar[bool]
    """Whether a folder can be renamed, so that it can appear and disappear as a whole."""
    few_writes: bool = False
    """Whether each write is a commit: then only one process should write, and not often."""

    @property
    @abstractmethod
    def location(self) -> str:
        """The absolute path or the URL, by which another process finds the store."""

    @abstractmethod
    def shown(self, name: str) -> str:
        """Return the path or the URL of a file, for messages."""

    # -------------------------------------------------------------------------------------------------- five verbs

    @abstractmethod
    def list(self, folder: str = "") -> list[str]:
        """Return the names in a folder, without the folder."""

    @abstractmethod
    def get(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Return the content of a file, or its bytes between two positions."""

    @abstractmethod
    def put(self, name: str, content: bytes | Path, *, exclusive: bool = False) -> None:
        """Write a file.

        Args:
            name: its name, in a folder that exists, if this is a disk.
            content: the bytes, or a file from ``draft`` of the same name, which is moved.
            exclusive: raise FileExistsError if the file exists; of several processes, one succeeds.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, or on a disk a folder with its content. Of a link, only the link. Nothing may be there."""

    @abstractmethod
    def modified(self, name: str) -> float:
        """Return when a file was written, in seconds by the clock of where it is."""

    # ----------------------------------------------------------------------------------------- what follows from them

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""

    @abstractmethod
    def touch(self, name: str, content: bytes) -> None:
        """Renew when a file was written, given its content."""

    @abstractmethod
    def draft(self, name: str) -> AbstractContextManager[Path]:
        """Context manager with the path of a new local file to write, for ``put``. At the end it is removed."""

    @abstractmethod
    def file(self, name: str) -> AbstractContextManager[Path]:
        """Context manager with the path of a local file with a file's content, which may be mapped for longer."""

    @abstractmethod
    def point(self, name: str, folder: str | None) -> None:
        """Have a name lead people to a folder, or to none."""

    @abstractmethod
    def probe(self, needed: int) -> None:
        """Raise CheckpointError unless files can be written, ``needed`` bytes in all. A disk's folder is made."""

    @abstractmethod
    def reason(self, error: Exception) -> str:
        """Return why a file could not be written or read, and what to do."""

    # -------------------------------------------------------------------------------- where disks and others differ

    def make(self, folder: str = "") -> None:
        """Make a folder of a disk, with the folders above it. An object store needs none."""

    def rename(self, old: str, new: str) -> None:
        """Rename a folder, if ``renames``."""
        raise NotImplementedError

    def check_space(self, needed: int, what: str) -> None:
        """Raise CheckpointError unless ``needed`` bytes fit where files are downloaded to. A disk needs no download.

        Args:
            needed: the number of bytes.
            what: what is not possible otherwise, for the message.
        """
