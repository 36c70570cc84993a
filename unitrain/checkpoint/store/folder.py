"""Where the checkpoints of a run are kept: what ``Checkpoint`` needs of a folder on a disk or in an object store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from unitrain.checkpoint.sharded import shards
from unitrain.checkpoint.store.manifest import DamagedError, Manifest
from unitrain.checkpoint.weights.mapped import MappedFiles
from unitrain.errors import CheckpointError
from unitrain.process import print_stderr

if TYPE_CHECKING:
    from unitrain.checkpoint.sharded.verifying import JointVerification

RUN_ID = "run-id"
"""The file that identifies a run, if emergency checkpoints of it may be elsewhere."""
RUN = "_run"
METRICS = "_metrics"
"""Parts of a checkpoint that are not an object's state."""


Others = Callable[[], Mapping[str, Any]]
"""Waits for the files that other ranks write, and returns what the manifest says of them."""


class Saved(NamedTuple):
    """An intact checkpoint that is open."""

    manifest: Manifest
    parts: dict[str, Any]
    """The states by name; their tensors are read from the disk when they are used. Some are ``RowBlocks``."""
    files: MappedFiles
    name: str
    """Its path or URL."""

    @staticmethod
    def of(manifest: Manifest, parts: Mapping[str, Any], files: MappedFiles, name: str) -> Saved:
        """Return the checkpoint ``name``, given the content of its files.

        Raises:
            DamagedError: it lacks what a run needs to continue.
        """
        run = parts.get(RUN)
        if not isinstance(run, dict) or not {"steps", "scaler", "random"} <= set(run):
            raise DamagedError(f"{name}: {RUN}.pt is missing, or lacks what a run needs to continue")
        try:
            return Saved(manifest, shards.join(parts), files, name)
        except Exception as error:  # files that were made by hand may contain anything
            raise DamagedError(f"{name}: its shards do not fit its states: {error}") from error


class Begun(Protocol):
    """A checkpoint that several ranks write together, as one of them sees it."""

    @property
    def place(self) -> list[str]:
        """What ``Folder.join`` finds it by on another rank."""

    def is_ready(self) -> bool:
        """Return whether files can be written. Raises CheckpointError if rank 0 has given it up."""

    def write(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Write each part to a file, and return what the manifest says of the files."""

    def tell(self, rank: int, said: str) -> None:
        """Leave a text of a rank for rank 0."""

    def told(self, rank: int) -> str | None:
        """Take the text that a rank has left; None if there is none yet."""

    def give_up(self) -> None:
        """Let nobody wait for rank 0, which has failed before it has written anything. Raises no error."""


class Folder(Protocol):
    """The checkpoints of a run, by their steps. Used on rank 0, except ``join``. Its string is the path or the URL.

    All methods raise CheckpointError if the folder can't be read or written.
    """

    def claim(self, needed: int) -> None:
        """Check that a checkpoint of at least ``needed`` bytes can be written, and keep other jobs from the folder."""

    def check(self) -> None:
        """Check that no other job has taken the folder."""

    def release(self) -> None:
        """Let other jobs use the folder. Further calls do nothing."""

    def name(self, step: int) -> str:
        """Return the path or URL of a step's checkpoint."""

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, newest first. It may be damaged, but is not half written."""

    def recover(self) -> None:
        """Bring back what a process that was killed had set aside for a new checkpoint of the same step."""

    def begin(self, step: int) -> Begun | None:
        """Begin a checkpoint whose files several ranks write. Return None if only rank 0 can write here."""

    def join(self, place: Sequence[str]) -> Begun | None:
        """Return, on another rank, the checkpoint that rank 0 has begun at a place; None if this rank does not see it.

        Raises CheckpointError, once, if it can't look.
        """

    def write(
        self,
        step: int,
        parts: Mapping[str, Any],
        about: Mapping[str, Any],
        begun: Begun | None = None,
        others: Others = dict,
    ) -> None:
        """Write a checkpoint, which is complete or not there. Remove what killed processes left incomplete.

        Args:
            step: number of the step.
            parts: states by name: tensors and plain data.
            about: plain data for the manifest.
            begun: what ``begin`` returned.
            others: waits for the files that other ranks write there, and returns what the manifest says of them.
        """

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of a checkpoint, or raise DamagedError."""

    def open(self, step: int, joint: JointVerification | None = None) -> Saved:
        """Verify and open a checkpoint. Raises DamagedError if a file is missing or changed.

        Args:
            step: number of the step.
            joint: has other ranks verify files with shards, too.
        """

    def take(self, step: int, source: Path) -> None:
        """Copy a verified checkpoint from another folder, unless there is one of this step. On any rank."""

    def run_id(self, *, make: bool) -> str | None:
        """Return what identifies the run whose checkpoints these are, or None if it has no identity.

        Args:
            make: give it one, if it has none.
        """

    def forget_run(self) -> None:
        """Remove the identity: what is saved from now on is another run's."""

    def remove(self, step: int) -> None:
        """Remove a checkpoint, at once as others see it."""

    def point_to_best(self, step: int | None) -> None:
        """Have the name ``best`` lead people to the checkpoint of a step, if there is one. A failure is reported."""


class NotACheckpointError(Exception):
    """What is at a path is no checkpoint; the message says what it is."""


def prune(folder: Folder, keep: int, best: int | None = None) -> None:
    """Remove the oldest checkpoints beyond ``keep``, but not that of the step ``best``.

    One that can't be removed is reported on stderr.
    """
    for step in folder.steps()[keep:]:
        if step == best:
            continue
        try:
            folder.remove(step)
        except CheckpointError as error:
            print_stderr(f"unitrain: an old checkpoint is kept: {error}")
