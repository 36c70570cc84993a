"""The ranks verify the shards in a checkpoint together, each some files, if all of them see it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unitrain.checkpoint.sharded import shards
from unitrain.checkpoint.sharded.shard_files import ShardFiles
from unitrain.checkpoint.store import manifest as manifests
from unitrain.checkpoint.store import storage
from unitrain.checkpoint.store.manifest import DamagedError, Described
from unitrain.checkpoint.weights.mapped import MappedFiles
from unitrain.checkpoint.weights.reading import open_regular
from unitrain.communication.communicator import Communicator
from unitrain.communication.streaming import Keys, RowBlocks
from unitrain.errors import CheckpointError

if TYPE_CHECKING:
    from unitrain.checkpoint.store.remote_files import RemoteFiles

Rows = Callable[[str, Keys, int], range]
"""Returns the rows that this rank reads of a tensor: of an object, at a path, that has so many."""


def _manifest(folder: Path) -> str | None:
    """Return a digest of the manifest in a folder; None if this process sees none."""
    try:
        with open_regular(folder / manifests.NAME) as file:
            return hashlib.sha256(file.read(manifests.LARGEST)).hexdigest()
    except OSError:
        return None


def _manifest_at(files: RemoteFiles) -> str | None:
    """Return a digest of the manifest in an object store; None if this process can't read it."""
    try:
        return hashlib.sha256(files.read(manifests.NAME)).hexdigest()
    except (FileNotFoundError, CheckpointError):
        return None


class JointVerification:
    """Rank 0 calls this to verify files, and ``end`` after the last call; meanwhile the others ``serve``.

    Each rank verifies and opens some of the files with shards: its own, which it reads, if there are as many ranks as
    when they were written. It learns from the others how many rows theirs have, and opens those of which it needs some.
    From an object store, it downloads what it opens. Files without shards are read by rank 0 only, which verifies them.

    Args:
        communicator: the communicator of this process.

    Attributes:
        files: maps the files of the checkpoint that was verified last.
        shards: its files with shards; None if there are none, or a rank does not see them.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.files: MappedFiles = MappedFiles()
        self.shards: ShardFiles | None = None

    def __call__(self, folder: Path, files: Mapping[str, Described]) -> None:
        """Verify the files of a folder. See ``storage.verify_files``."""
        several = {name: expected for name, expected in files.items() if name.startswith(shards.PREFIX)}
        path = folder.resolve()
        self.shards = None
        storage.verify_files(folder, {name: expected for name, expected in files.items() if name not in several})
        if several and not self._asked(str(path), _manifest(path), several, remote=False):
            storage.verify_files(folder, several)

    def download(self, files: RemoteFiles, several: Mapping[str, Described]) -> Mapping[str, Any] | None:
        """Download and verify files with shards, each on one rank, and return their contents here, by name.

        Args:
            files: those of the checkpoint.
            several: the files with shards, by name.

        Returns:
            None if there are none, or a rank can't read them.

        Raises:
            DamagedError: one is missing or changed.
        """
        self.shards = None
        if several:
            self._asked(files.url, _manifest_at(files), several, remote=True)
        return None if self.shards is None else self.shards.contents()

    def _asked(self, place: str, manifest: str | None, files: Mapping[str, Described], *, remote: bool) -> bool:
        """Have all ranks verify files, and return whether all see them."""
        described = {name: one.model_dump() for name, one in files.items()}
        request = {"place": place, "remote": remote, "manifest": manifest, "files": described}
        for answer in self._answers(self._communicator.broadcast_data(request)):
            if answer["error"] and self.shards is not None:
                raise DamagedError(answer["error"])
        return self.shards is not None

    def end(self) -> None:
        """Let the other ranks go on."""
        self._communicator.broadcast_data(None)

    def serve(self) -> None:
        """Verify what rank 0 asks for, until it ends."""
        while (request := self._communicator.broadcast_data(None)) is not None:
            self._answers(request)

    def _answers(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Return what each rank has found: whether it sees the files, and damage."""
        self.files, self.shards = MappedFiles(), None
        files = {name: Described(**expected) for name, expected in sorted(request["files"].items())}
        # As many, one after the other: what a rank needs of tensors that are divided anew is mostly in these.
        ranks = self._communicator
        own = [number for number in range(len(files)) if number * ranks.world_size // len(files) == ranks.rank]
        answer: dict[str, Any] = {"sees": True, "error": None, "rows": {}}
        found = None
        try:
            found = self._remote(request, files) if request["remote"] else self._local(request, files, own)
            if found is not None:
                found.fetch(own)
                answer["rows"] = found.loaded_rows()
        except DamagedError as error:
            answer["error"] = str(error)
        except CheckpointError:  # rank 0 reads them all, and raises it
            found = None
        answer["sees"] = found is not None or answer["error"] is not None
        answers = ranks.all_gather_data(answer)
        if all(one["sees"] for one in answers):
            self.shards = found or ShardFiles([], lambda names: {})  # none is read: there is damage
            self.shards.rows = {name: rows for one in answers for name, rows in one["rows"].items()}
        return answers

    def _local(self, request: dict[str, Any], files: Mapping[str, Described], own: Sequence[int]) -> ShardFiles | None:
        folder, names = Path(request["place"]), list(files)
        if _manifest(folder) != request["manifest"]:
            return None
        storage.verify_files(folder, {names[number]: files[names[number]] for number in own})
        return ShardFiles(names, partial(storage.read, folder, files=self.files))

    def _remote(self, request: dict[str, Any], files: Mapping[str, Described]) -> ShardFiles | None:
        from unitrain.checkpoint.store.download import download  # and fsspec
        from unitrain.checkpoint.store.remote_files import RemoteFiles

        store = RemoteFiles(request["place"])
        if _manifest_at(store) != request["manifest"]:
            return None

        return ShardFiles(list(files), lambda names: download(store, {name: files[name] for name in names}, self.files))

    def blocks(
        self, places: Mapping[str, Sequence[Keys]], outlines: Mapping[str, Any], rows: Rows
    ) -> dict[str, dict[Keys, RowBlocks]]:
        """Return the blocks in the files with shards, of which this rank has those with rows that it reads. Collective.

        Args:
            places: see ``shards.blocks_at``.
            outlines: see ``shards.blocks_at``.
            rows: the rows that this rank reads.

        Raises:
            CheckpointError: a file can't be read; on every rank.
        """
        if self.shards is None:
            return {}
        held = shards.blocks_at(places, outlines, self.shards.contents().values())
        needed = {
            number
            for name, found in held.items()
            for path, its in found.items()
            for number in _overlapping(its, rows(name, path, its.form.shape[0]))
        }
        why = ""
        try:
            self.shards.fetch(needed)
        except (DamagedError, CheckpointError) as error:
            why = str(error)
        failures = list(filter(None, self._communicator.all_gather_data(why)))
        if failures:
            raise CheckpointError(f"{failures[0]}. Nothing was loaded.")
        return shards.blocks_at(places, outlines, self.shards.contents().values())


def _overlapping(blocks: RowBlocks, rows: range) -> list[int]:
    """Return the numbers of the blocks that have some of the rows."""
    ends = list(accumulate(map(len, blocks.blocks)))
    return [
        number
        for number, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
        if start < rows.stop and rows.start < end and start < end
    ]
