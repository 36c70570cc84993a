"""Where the checkpoints of a run are kept: what ``Checkpoint`` needs of a folder on a disk or in an object store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from unitrain.checkpoint.manifest import DamagedError, Manifest
from unitrain.checkpoint.mapped import MappedFiles
from unitrain.errors import CheckpointError
from unitrain.process import print_stderr

RUN = "_run"
METRICS = "_metrics"
"""Parts of a checkpoint that are not an object's state."""


class Saved(NamedTuple):
    """An intact checkpoint that is open."""

    manifest: Manifest
    parts: dict[str, Any]
    """The states by name; their tensors are read from the disk when they are used."""
    files: MappedFiles
    name: str
    """Its path or URL."""

    def checked(self) -> Saved:
        """Return this checkpoint.

        Raises:
            DamagedError: it lacks what a run needs to continue.
        """
        run = self.parts.get(RUN)
        if not isinstance(run, dict) or not {"steps", "scaler", "random"} <= set(run):
            raise DamagedError(f"{self.name}: {RUN}.pt is missing, or lacks what a run needs to continue")
        return self


class Folder(Protocol):
    """The checkpoints of a run, by their steps. Used on rank 0. Its string is the path or the URL.

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

    def write(self, step: int, parts: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Write a checkpoint, which is complete or not there. Remove what killed processes left incomplete.

        Args:
            step: number of the step.
            parts: states by name: tensors and plain data.
            about: plain data for the manifest.
        """

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of a checkpoint, or raise DamagedError."""

    def open(self, step: int) -> Saved:
        """Verify and open a checkpoint. Raises DamagedError if a file is missing or changed."""

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
