"""The interface between a loader and the training loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from unitrain.data.sharding import MicroBatch


class Iteration:
    """One iteration over a loader.

    Attributes:
        trained: whether one of its batches was used in a backward. If it ends before that, as in
            ``next(iter(loader))``, it does not count as an epoch.
    """

    __slots__ = ("trained",)

    def __init__(self) -> None:
        self.trained: bool = False


class LoopListener(Protocol):
    """Receives notifications from a loader."""

    def is_training(self) -> bool:
        """Return whether batches are used for training, and not for an evaluation."""

    def boundary(self) -> None:
        """All previous batches have been used: the run can be stopped here."""

    def yields(self, micro_batch: MicroBatch | None, iteration: Iteration) -> None:
        """The loader is about to yield a micro-batch for training; None at the end."""

    def observed(self, batches: Iterator[tuple[MicroBatch, Any]]) -> Iterator[tuple[MicroBatch, Any]]:
        """Return the iterator that the loader yields from: the same, or one that measures it."""
