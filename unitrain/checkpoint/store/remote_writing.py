"""Writes the files of a checkpoint into an object store, from one rank or from several."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from unitrain.checkpoint.store.remote_files import RemoteFiles
from unitrain.checkpoint.writing import check_part, write_part
from unitrain.errors import CheckpointError

ANNOUNCED = ".saving."
"""What the names of objects begin with that tell other ranks where rank 0 has begun a checkpoint."""


def upload(files: RemoteFiles, folder: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Write each part to an object, and return what the manifest says of the objects."""
    described: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="unitrain-") as temporary:
        for part, value in parts.items():
            file = Path(temporary, f"{part}.pt")
            described[file.name] = write_part(file, value)
            check_part(file)
            files.upload(file, f"{folder}/{file.name}")
            file.unlink()  # one part at a time is on the disk
    return described


class BegunInStore:
    """A ``Begun`` in an object store. Rank 0 chooses its folder in the background, and writes its name to an object.

    Args:
        files: those of the run.
        token: tells this checkpoint from all others.
        holder: the token of the lock of the run's folder.
    """

    def __init__(self, files: RemoteFiles, token: str, holder: str) -> None:
        self._files = files
        self._token = token
        self._holder = holder
        self._folder: str | None = None

    @property
    def place(self) -> list[str]:
        """See ``Begun.place``."""
        return [self._token, self._holder]

    def announce(self, folder: str) -> None:
        """Tell the other ranks the name of the checkpoint's folder; "" if there won't be any."""
        self._folder = folder
        self._files.write(f"{ANNOUNCED}{self._token}", folder.encode())

    def give_up(self) -> None:
        """See ``Begun.give_up``."""
        with suppress(CheckpointError):
            self.announce("")

    def end(self) -> None:
        """Remove the announcement, which every rank has read."""
        self._files.remove(f"{ANNOUNCED}{self._token}")

    def is_ready(self) -> bool:
        """See ``Begun.is_ready``."""
        if self._folder is None:
            try:
                self._folder = self._files.read(f"{ANNOUNCED}{self._token}").decode()
            except FileNotFoundError:
                return False
        if not self._folder:
            raise CheckpointError("rank 0 has given the checkpoint up")
        return True

    def write(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """See ``Begun.write``."""
        return upload(self._files, str(self._folder), parts)

    def tell(self, rank: int, said: str) -> None:
        """See ``Begun.tell``."""
        self._files.write(self._description(rank), said.encode())

    def told(self, rank: int) -> str | None:
        """See ``Begun.told``."""
        try:
            said = self._files.read(self._description(rank)).decode()
        except FileNotFoundError:
            return None
        self._files.remove(self._description(rank))
        return said

    def _description(self, rank: int) -> str:
        if not self._folder:
            raise CheckpointError("there is no folder that rank 0 looks at")
        return f"{self._folder}/rank-{rank}.json"
