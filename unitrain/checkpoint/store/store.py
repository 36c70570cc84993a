"""``Store``: the verbs on which everything about checkpoints is built, for a disk and for an object store alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from unitrain.checkpoint.store.torch_files import reason, refusal, write_part
from unitrain.errors import CheckpointError

NAME = "manifest.json"
FOLDER = re.compile(r"step-(\d{10})(?:\.(\d+))?")
"""The names of the folders of checkpoints: the step, and how often it had been saved before."""


def folder_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step-{step:010d}"


class Store(Protocol):
    """Files below a path or a URL, by names relative to it. Its string is the path or the URL.

    A file is replaced at once and as a whole: readers see the old file or the new one.

    A missing file raises FileNotFoundError. Other errors are OSErrors on a disk; an object store raises CheckpointError
    with a message that says what to do.
    """

    few_writes: bool = False  # whether each write is a commit, so that only one process should write, and not often

    @property
    def location(self) -> str:
        """The absolute path or the URL, by which another process finds the store."""

    def shown(self, name: str) -> str:
        """Return the path or the URL of a file, for messages."""
        return f"{self}/{name}" if name else str(self)

    def list(self, folder: str = "") -> list[str]:
        """Return the names in a folder, without the folder."""

    def get(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Return the content of a file, or its bytes between two positions."""

    def put(self, name: str, content: bytes, *, exclusive: bool = False) -> None:
        """Write a file.

        Args:
            name: its name, in a folder that exists, if this is a disk.
            content: the bytes.
            exclusive: raise FileExistsError if the file exists; of several processes, one succeeds.
        """

    def remove(self, name: str) -> None:
        """Remove a file. A missing one is no error."""

    def unmake(self, folder: str) -> None:
        """Remove the folder of a checkpoint, its manifest first, or a link to one. A missing one is no error."""

    def modified(self, name: str) -> float:
        """Return when a file was written, in seconds by the clock of where it is."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""

    def draft(self, name: str) -> AbstractContextManager[Path]:
        """Context manager with the path of a new local file to write. It becomes the file at the end, but for an error.

        If it was not written, nothing is changed.
        """

    def file(self, name: str) -> AbstractContextManager[Path]:
        """Context manager with the path of a local file with a file's content. A mapping outlasts the context."""

    def probe(self, needed: int) -> None:
        """Raise CheckpointError unless files can be written, ``needed`` bytes in all. A disk's folder is made."""

    def reason(self, error: Exception) -> str:
        """Return the reason why a file could not be written or read, and the remedy."""
        return reason(error)

    @contextmanager
    def explained(self, failure: str, passes: type[Exception] = CheckpointError) -> Iterator[None]:
        """Raise any error as a CheckpointError with the failure and its reason.

        Args:
            failure: a clause such as "the file can't be written".
            passes: errors of this class, and CheckpointErrors, are raised as they are.
        """
        try:
            yield
        except Exception as error:  # pickling may raise any exception, and each library has exceptions of its own
            if isinstance(error, (CheckpointError, passes)):
                raise
            raise CheckpointError(f"{failure}: {self.reason(error)}") from error

    def write(self, name: str, value: Any, save: Callable[..., object] = torch.save) -> dict[str, Any]:
        """Write tensors and plain data to a file of torch, checked. Return the file's entry in a manifest."""
        with self.draft(name) as draft:
            try:
                described = write_part(draft, lambda file: save(value, file))
                # What can't be loaded is found now. The tensors' data are not read.
                torch.load(draft, map_location="cpu", weights_only=True, mmap=True)
                return described
            except (CheckpointError, OSError):
                raise
            except Exception as error:
                raise refusal(name.rpartition("/")[2].removesuffix(".pt"), value, error) from error

    def make(self, folder: str = "") -> None:
        """Make a folder of a disk, with the folders above it. An object store needs none."""
        return

    def touch(self, name: str, content: bytes) -> None:
        """Update the time at which a file was written, given the file's content."""
        self.put(name, content)

    def sync(self, folder: str) -> None:
        """Sync a folder's names to the disk. Object stores need no sync."""
        return
