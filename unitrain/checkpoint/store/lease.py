"""The lock of a folder in an object store: an object that its holder writes again every few seconds.

Object stores have no file locks. Of two jobs that start at the same time, the server decides: the object is created
only if there is none. Over the lock of a job that has ended without removing it, which is silent, two may both be let
in within the same moment; then the one that came first finds out before it writes its next manifest, and fails.
"""

from __future__ import annotations

from contextlib import suppress

from unitrain.checkpoint.store.lock import LARGEST, NAME, Holder, Lock
from unitrain.checkpoint.store.remote_files import RemoteFiles

EACH_WRITE_IS_A_COMMIT = ("hf",)
"""Schemes of stores that are not to be written to often, nor by several processes at once."""


class Lease(Lock):
    """The lock of a folder in an object store.

    Args:
        files: those of the folder.
    """

    def __init__(self, files: RemoteFiles) -> None:
        self._files = files
        self._beats = files.scheme not in EACH_WRITE_IS_A_COMMIT
        super().__init__(files.url)

    @property
    def token(self) -> str:
        """The token of this lock."""
        return self._own.token

    @property
    def _remedy(self) -> str:
        return "" if self._beats else f" If it was killed, remove {self._files.name(NAME)}."

    def _read(self) -> Holder | None:
        return holder_at(self._files)

    def _write(self, text: bytes, *, replaces: bool) -> None:
        with suppress(FileExistsError):  # by another process, just now
            self._files.write(NAME, text, exclusive=not replaces)

    def _is_touched(self, holder: Holder) -> bool:
        return super()._is_touched(holder) if self._beats else True

    def _touch(self) -> None:
        if self._beats:
            self._files.write(NAME, self._own.model_dump_json().encode())

    def _touched(self) -> float:
        try:
            return self._files.modified(NAME)
        except FileNotFoundError:
            return 0.0

    def _clock(self) -> float:
        name = f"{NAME}.{self._own.token}"
        self._files.write(name, b"now")
        try:
            return self._files.modified(name)
        finally:
            self._files.remove(name)

    def _remove(self) -> None:
        self._files.remove(NAME)


def holder_at(files: RemoteFiles) -> Holder | None:
    """Return the holder of the lock of a folder, an unknown one if the object is damaged, or None."""
    try:
        return Holder.parsed(files.read(NAME)[:LARGEST])
    except FileNotFoundError:
        return None
