"""Opens the checkpoint to resume from on all ranks: rank 0 chooses it, and the others learn its outline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from unitrain.checkpoint.sharded import saved
from unitrain.checkpoint.sharded.saved import Saved
from unitrain.checkpoint.sharded.shards import paths
from unitrain.checkpoint.sharded.verifying import JointVerification
from unitrain.checkpoint.store.folder import Folder
from unitrain.checkpoint.store.manifest import Manifest
from unitrain.communication.communicator import Communicator
from unitrain.communication.streaming import Keys, outline


class Opened(NamedTuple):
    """An open checkpoint, as a rank sees it."""

    manifest: Manifest
    outlines: dict[str, Any]
    """The states by name, with the forms of the tensors in their places."""
    paths: dict[str, list[Keys]]
    """By name, where in the states the tensors are of which several ranks have written blocks."""
    saved: Saved | None
    """The checkpoint itself; on rank 0 only."""
    joint: JointVerification | None
    """Knows the files that this rank can read; None if only rank 0 reads."""

    def source(self, name: str) -> Any:
        """Return a state with its tensors on rank 0, and None on the others."""
        return None if self.saved is None else self.saved.parts[name]

    def release(self) -> None:
        """Release the memory of what has been read."""
        if self.saved is not None:
            self.saved.files.release()
        elif self.joint is not None:
            self.joint.files.release()


def open_checkpoint(
    communicator: Communicator, path: str | Path | None, folder: Folder, before: Callable[[], None]
) -> Opened | None:
    """Verify and open the checkpoint to resume from, or return None if there is none. Collective.

    Args:
        communicator: the communicator of this process.
        path: of a checkpoint; ``"best"`` for the best; None for the newest.
        folder: that of this run's checkpoints.
        before: called before, on rank 0.

    Raises:
        CheckpointError: none is intact; on every rank.
    """
    found: Saved | None = None
    joint = JointVerification(communicator) if communicator.shards else None

    def find() -> tuple[dict[str, Any], dict[str, Any], dict[str, list[Keys]]] | None:
        nonlocal found
        try:
            before()
            found = saved.wanted(path, folder, joint)
        finally:
            if joint is not None:
                joint.end()
        return None if found is None else (found.manifest.model_dump(), outline(found.parts), paths(found.parts))

    if joint is not None and not communicator.is_main:
        joint.serve()
    told = communicator.on_main(find)
    if told is None:
        return None
    manifest, outlines, places = told
    return Opened(Manifest.model_validate(manifest), outlines, places, found, joint)
