"""The ranks verify the shards in a checkpoint together, each some files, if all of them see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from unitrain.checkpoint.sharded import shards
from unitrain.checkpoint.sharded.shard_files import ShardFiles
from unitrain.checkpoint.store.located import Located, NotACheckpointError, checkpoint_at, read
from unitrain.checkpoint.store.manifest import DamagedError
from unitrain.checkpoint.store.mapped import MappedFiles
from unitrain.communication.communicator import Communicator
from unitrain.communication.streaming import Keys, RowBlocks
from unitrain.errors import CheckpointError
from unitrain.url import parsed

Rows = Callable[[str, Keys, int], range]
"""Returns the rows that this rank reads of a tensor: of an object, at a path, that has so many."""


def _seen(request: dict[str, Any]) -> Located | None:
    """Return the checkpoint that rank 0 reads; None if this process does not see it."""
    try:
        found = checkpoint_at(parsed(request["place"]))
    except (NotACheckpointError, DamagedError, CheckpointError):
        return None
    return found if found.manifest.model_dump() == request["manifest"] else None


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

    def read(self, found: Located, several: Sequence[str]) -> Mapping[str, Any] | None:
        """Verify and open files with shards, each on one rank, and return their contents here, by name.

        Args:
            found: the checkpoint.
            several: names of the files with shards.

        Returns:
            None if a rank can't read them.

        Raises:
            DamagedError: one is missing or changed.
        """
        request = {"place": found.place, "manifest": found.manifest.model_dump(), "files": list(several)}
        for answer in self._answers(self._communicator.broadcast_data(request)):
            if answer["error"] and self.shards is not None:
                raise DamagedError(answer["error"])
        return None if self.shards is None else self.shards.contents()

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
        names = sorted(request["files"])
        # As many, one after the other: what a rank needs of tensors that are divided anew is mostly in these.
        ranks = self._communicator
        own = [number for number in range(len(names)) if number * ranks.world_size // len(names) == ranks.rank]
        answer: dict[str, Any] = {"sees": True, "error": None, "rows": {}}
        shards = None
        try:
            found = _seen(request)
            if found is not None:
                shards = ShardFiles(names, partial(read, found, mapped=self.files))
                shards.fetch(own)
                answer["rows"] = shards.loaded_rows()
        except DamagedError as error:
            answer["error"] = str(error)
        except CheckpointError:  # rank 0 reads them all, and raises it
            shards = None
        answer["sees"] = shards is not None or answer["error"] is not None
        answers = ranks.all_gather_data(answer)
        if all(one["sees"] for one in answers):
            self.shards = shards or ShardFiles([], lambda names: {})  # none is read: there is damage
            self.shards.rows = {name: rows for one in answers for name, rows in one["rows"].items()}
        return answers

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
