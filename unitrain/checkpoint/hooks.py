"""``CheckpointHook``: lets features act when a run is saved and resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from unitrain.checkpoint.store.located import Located


class Candidate(NamedTuple):
    """A checkpoint outside of the run's folder, from which the run may be resumed."""

    located: Located
    place: str  # where it is, for a message


class CheckpointHook:
    """Base class of hooks that are called when a run is saved and resumed. A subclass overrides the methods it needs.

    All methods but ``abandon`` are called on all ranks, and may be collective.

    Attributes:
        name: of the feature.
    """

    name: str

    def label(self) -> Mapping[str, Any]:
        """Return plain data for manifests, which have it under the feature's name. Not collective."""
        return {}

    def candidates(self) -> list[Candidate]:
        """Return candidates that are newer than the folder's newest checkpoint, the newest first; on rank 0."""
        return []

    def resumed(self, step: int, folder: str) -> None:
        """The run continues after a step, from a candidate in a folder, or from a checkpoint if that is ""."""

    def discarded(self) -> None:
        """All checkpoints were removed: a new run begins."""

    def closed(self) -> None:
        """The checkpoint is closed, or the run has stopped and is saved. It may be called twice."""

    def abandon(self) -> None:
        """End threads without waiting for their work: the run fails. Not collective."""
