"""The checkpoints of a run in an object store: the manifest is written last, and what has none is no checkpoint.

Objects can't be renamed. So a step that is saved again gets a folder of its own, ``step-0000000120.2``, and the one
before is removed when that is complete. Files are written and read through temporary files on the disk of a rank.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from unitrain.checkpoint.store import manifest as manifests
from unitrain.checkpoint.store import storage
from unitrain.checkpoint.store.download import check_space
from unitrain.checkpoint.store.folder import RUN_ID, Begun, NotACheckpointError, Others, Saved
from unitrain.checkpoint.store.lease import EACH_WRITE_IS_A_COMMIT, Lease, holder_at
from unitrain.checkpoint.store.manifest import Manifest, folder_name
from unitrain.checkpoint.store.remote_files import RemoteFiles
from unitrain.checkpoint.store.remote_reading import manifest_of, opened
from unitrain.checkpoint.store.remote_writing import ANNOUNCED, BegunInStore, upload
from unitrain.checkpoint.weights.reading import reason
from unitrain.errors import CheckpointError
from unitrain.process import print_stderr

if TYPE_CHECKING:
    from unitrain.checkpoint.sharded.verifying import JointVerification

SILENT_S = 5.0
"""Libraries try for minutes to reach a server that does not answer, and say nothing meanwhile."""
_FOLDER = re.compile(r"step-(\d{10})(?:\.(\d+))?")


class RemoteFolder:
    """A ``Folder`` in an object store.

    Args:
        url: such as ``s3://bucket/run``.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._lease: Lease | None = None
        self._connected: RemoteFiles | None = None
        self._sees: bool | None = None  # what rank 0 writes; of another rank, when it has looked

    @property
    def _files(self) -> RemoteFiles:
        if self._connected is None:  # others than rank 0 need no library and no connection, unless there are shards
            self._connected = RemoteFiles(self._url)
        return self._connected

    def __str__(self) -> str:
        return self._url

    def claim(self, needed: int) -> None:
        """See ``Folder.claim``."""
        files = self._files
        check_space(needed, f"checkpoints can't be written to {self}")
        said = f"unitrain: {self} has not answered for {SILENT_S:g} s. It is tried again before this is an error."
        silence = threading.Timer(SILENT_S, lambda: print_stderr(said))
        silence.daemon = True
        silence.start()
        try:
            files.names()
        finally:
            silence.cancel()
        self._lease = Lease(files)

    def check(self) -> None:
        """See ``Folder.check``."""
        if self._lease is not None:
            self._lease.check()

    def release(self) -> None:
        """See ``Folder.release``."""
        if self._lease is not None:
            self._lease.release()

    def name(self, step: int) -> str:
        """See ``Folder.name``."""
        return self._files.name(self._complete().get(step, folder_name(step)))

    def steps(self) -> list[int]:
        """See ``Folder.steps``."""
        return sorted(self._complete(), reverse=True)

    def recover(self) -> None:
        """See ``Folder.recover``: nothing is ever set aside."""

    def begin(self, step: int) -> BegunInStore | None:
        """See ``Folder.begin``. The server is not waited for here, but in the background."""
        if self._lease is None or self._files.scheme in EACH_WRITE_IS_A_COMMIT:
            return None
        return BegunInStore(self._files, uuid4().hex, self._lease.token)

    def join(self, place: Sequence[str]) -> BegunInStore | None:
        """See ``Folder.join``: a rank that sees the lock of rank 0 sees the rest."""
        token, lock = place
        if self._sees is None:
            self._sees = False
            holder = holder_at(self._files)
            self._sees = holder is not None and holder.token == lock
        return BegunInStore(self._files, token, lock) if self._sees else None

    def write(
        self,
        step: int,
        parts: Mapping[str, Any],
        about: Mapping[str, Any],
        begun: Begun | None = None,
        others: Others = dict,
    ) -> None:
        """See ``Folder.write``."""
        several = begun if isinstance(begun, BegunInStore) else None
        folders = self._folders()
        complete = self._complete(folders)
        for name in folders:
            if name not in complete.values():
                self._remove(name)
        for name in self._files.names():
            if name.startswith(ANNOUNCED):
                self._files.remove(name)
        before = complete.get(step)
        name = folder_name(step) if before is None else f"{folder_name(step)}.{_attempt(before) + 1}"
        try:
            if several is not None:
                several.announce(name)
            described = {**upload(self._files, name, parts), **others()}
            self.check()  # another job may have taken the folder meanwhile
            self._files.write(f"{name}/{manifests.NAME}", manifests.to_json(step, about, described).encode())
        except CheckpointError:
            raise
        except Exception as error:  # pickling may raise any exception
            why = self._files.reason(error) if isinstance(error, OSError) else reason(error)
            raise CheckpointError(f"checkpoint {self._files.name(name)} could not be written: {why}") from error
        if several is not None:
            several.end()
        if before is not None:
            self._remove(before)

    def manifest(self, step: int) -> Manifest:
        """See ``Folder.manifest``."""
        return manifest_of(self._at(step))

    def open(self, step: int, joint: JointVerification | None = None) -> Saved:
        """See ``Folder.open``."""
        return opened(self._at(step), joint)

    def _at(self, step: int) -> RemoteFiles:
        return RemoteFiles(self._files.name(self._complete().get(step, folder_name(step))))

    def take(self, step: int, source: Path) -> None:
        """See ``Folder.take``."""
        if step in self._complete():
            return
        name = folder_name(step)
        for file in manifests.read(source).files:
            self._files.upload(source / file, f"{name}/{file}")
        self._files.write(f"{name}/{manifests.NAME}", (source / manifests.NAME).read_bytes())

    def run_id(self, *, make: bool) -> str | None:
        """See ``Folder.run_id``."""
        try:
            return self._files.read(RUN_ID).decode(errors="replace")
        except FileNotFoundError:
            if not make:
                return None
        made = uuid4().hex
        self._files.write(RUN_ID, made.encode())
        return made

    def forget_run(self) -> None:
        """See ``Folder.forget_run``."""
        self._files.remove(RUN_ID)

    def remove(self, step: int) -> None:
        """See ``Folder.remove``."""
        name = self._complete().get(step)
        if name is not None:
            self._remove(name)

    def point_to_best(self, step: int | None) -> None:
        """See ``Folder.point_to_best``: a text file names the folder."""
        try:
            name = None if step is None else self._complete().get(step)
            with suppress(FileNotFoundError):
                found = self._files.read(storage.BEST)
                if name is not None and found == name.encode():
                    return
                if not _FOLDER.fullmatch(found.decode(errors="replace")):
                    raise CheckpointError(f"{self._files.name(storage.BEST)} is somebody else's")
            if name is None:
                self._files.remove(storage.BEST)
            else:
                self._files.write(storage.BEST, name.encode())
        except CheckpointError as error:
            print_stderr(f'unitrain: the name of the best checkpoint was not written: {error}. resume("best") works.')

    def _folders(self) -> list[str]:
        return [name for name in self._files.names() if _FOLDER.fullmatch(name)]

    def _complete(self, folders: list[str] | None = None) -> dict[int, str]:
        """Return the folders that have a manifest, by their step: of several of one step, the last."""
        folders = self._folders() if folders is None else folders
        whole = [name for name in folders if manifests.NAME in self._files.names(name)]
        return {int(name[5:15]): name for name in sorted(whole, key=_attempt)}

    def _remove(self, name: str) -> None:
        """Remove a folder. Without its manifest, which goes first, it is no checkpoint any more."""
        for file in [manifests.NAME, *self._files.names(name)]:
            self._files.remove(f"{name}/{file}")


def checkpoint_under(url: str, joint: JointVerification | None = None) -> Saved:
    """Verify and open the checkpoint at a URL; with ``joint``, other ranks download files with shards, too.

    Raises:
        NotACheckpointError: there is none.
        DamagedError: a file of it is missing or changed.
    """
    files = RemoteFiles(url)
    names = files.names()
    if not names:
        raise NotACheckpointError("does not exist")
    if manifests.NAME not in names:
        inside = max(filter(_FOLDER.fullmatch, names), default=None)
        raise NotACheckpointError(
            "is no checkpoint" if inside is None else f"contains checkpoints, such as {inside}, but is none itself"
        )
    return opened(files, joint)


def _attempt(name: str) -> int:
    """Return how many times a step had been saved when this folder was written."""
    match = _FOLDER.fullmatch(name)
    return int(match[2] or 1) if match else 0
