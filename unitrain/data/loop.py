"""The interface between a loader and the training loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from unitrain.data.order.sharding import MicroBatch
from unitrain.data.order.shares import Shares


class Iteration:
    """One iteration over a loader.

    Args:
        loader: an object that stands for the loader.

    Attributes:
        loader: that object.
        trained: whether one of its batches was used in a backward. If it ends before that, as in
            ``next(iter(loader))``, it does not count as an epoch.
        trained_to: how many samples and steps of the epoch were consumed at the end of the last window that was trained
            on; None before that.
        gathers: whether ``gather`` was called for a batch of it, in an evaluation.
    """

    __slots__ = ("gathers", "loader", "trained", "trained_to")

    def __init__(self, loader: object) -> None:
        self.loader: object = loader
        self.trained: bool = False
        self.trained_to: tuple[int, int] | None = None
        self.gathers: bool = False


class BatchInUse:
    """The batch that the script works on: the one that was yielded last, or that the last forward was given.

    Attributes:
        is_stand_in: whether it is the stand-in of a rank without samples, and counts for nothing. An attribute, since
            compiled code that reads it must not depend on the number of samples.
    """

    __slots__ = ("_micro_batch", "is_stand_in")

    def __init__(self) -> None:
        self.micro_batch = None

    @property
    def micro_batch(self) -> MicroBatch | None:
        """Its micro-batch; None without a loader."""
        return self._micro_batch

    @micro_batch.setter
    def micro_batch(self, micro_batch: MicroBatch | None) -> None:
        self._micro_batch: MicroBatch | None = micro_batch
        self.is_stand_in: bool = micro_batch is not None and not micro_batch.count

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchInUse:
        """Return this object: a copy of a model is used with the same batches."""
        return self


class LoopListener(Protocol):
    """Receives notifications from a loader.

    Attributes:
        shares: the shares of the ranks in every micro-batch.
    """

    shares: Shares

    def is_training(self) -> bool:
        """Return whether batches are used for training, and not for an evaluation."""

    def needs_stand_ins(self, iteration: Iteration) -> bool:
        """Return whether a rank without samples has to take part in what is done with a batch all the same."""

    def follows(self) -> None:
        """What follows the previous training iteration is done: another starts, or the loop over epochs continues."""

    def boundary(self) -> None:
        """All previous batches have been used: the run can be stopped here."""

    def yields(self, micro_batch: MicroBatch | None, batch: Any, iteration: Iteration, *, training: bool) -> None:
        """The loader is about to yield a batch, for training or for an evaluation; None at the end of an iteration."""

    def balance(self) -> None:
        """A window has ended: if enough was measured, set the shares in proportion. Collective then."""

    def drops(self, iteration: Iteration) -> None:
        """An iteration ended before any of its batches was trained on, and does not count."""

    def observed(self, batches: Iterator[tuple[MicroBatch, Any]]) -> Iterator[tuple[MicroBatch, Any]]:
        """Return the iterator that the loader yields from: the same, or one that measures it."""
