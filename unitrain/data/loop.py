"""What a loader knows of the training loop around it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from unitrain.data.sharding import MicroBatch


class Iteration:
    """One iteration over a loader.

    Attributes:
        trained: whether one of its batches has gone into a backward. One that was broken off before that, a peek at
            the first batch say, does not count as an epoch.
    """

    __slots__ = ("trained",)

    def __init__(self) -> None:
        self.trained: bool = False


class LoopListener(Protocol):
    """What a loader tells the training loop."""

    def is_training(self) -> bool:
        """Return whether batches are asked for to train on, and not for an evaluation."""

    def boundary(self) -> None:
        """All that was yielded before has been used: the run can be stopped here."""

    def yields(self, micro_batch: MicroBatch | None, iteration: Iteration) -> None:
        """The loader is about to yield a micro-batch to train on; None: there are no more."""

    def observed(self, batches: Iterator[tuple[MicroBatch, Any]]) -> Iterator[tuple[MicroBatch, Any]]:
        """Return the iterator that the loader is to yield from: the same, or one that measures it."""
