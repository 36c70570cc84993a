"""``LoopListener``: the interface by which loaders notify the training loop, and the iterations that they share."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.optim import optimizer as torch_optimizer

from unitrain.communication.communicator import Communicator
from unitrain.data.order.sharding import MicroBatch

Batches = Iterator[tuple[MicroBatch, Any]]
"""Micro-batches, each with the batch that a loader yields for it."""


class OptimizerSteps:
    """Counts the steps of all optimizers of the process, for loops that don't use ``strategy.step``.

    Attributes:
        count: their number so far.
    """

    def __init__(self) -> None:
        self.count: int = 0
        # For all optimizers of the process, and for good: loaders are told neither which are used nor of their end.
        torch_optimizer.register_optimizer_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.count += 1


@functools.cache
def optimizer_steps() -> OptimizerSteps:
    """Return the one counter of the process."""
    return OptimizerSteps()


@dataclass(eq=False)
class Iteration:
    """One iteration over a loader."""

    loader: object  # stands for the loader
    order: tuple[int, int] | None = None  # the seed and the epoch; None if positions in it differ between worlds
    micro_batch: MicroBatch | None = None  # the one that was yielded last
    yielded_to: tuple[int, int] | None = None  # samples and steps of the epoch, up to the last window that was yielded
    trained: bool = False
    """Whether one of its batches was used in a backward. Otherwise, as in ``next(iter(loader))``, it is no epoch."""
    trained_to: tuple[int, int] | None = None  # as ``yielded_to``, for the last window that was trained on
    reached: int = 0  # position in the order up to which samples were trained on, or left out by the script
    open_at_once: int = 1  # number of batches of the loader that were open at its first backward
    gathers: bool = False  # whether ``gather`` was called for a batch of it, in an evaluation
    versions: dict[Any, int] = field(default_factory=dict)  # of each optimizer's parameters, when it began
    is_over: bool = False  # ended, or left
    began_at: int | None = None  # how many steps all optimizers had made when it began; None in an evaluation

    def take(self, micro_batch: MicroBatch) -> None:
        """Record the micro-batch that is yielded."""
        self.micro_batch = micro_batch
        # Samples are consumed at the end of a window: checkpoints don't contain accumulated gradients.
        if micro_batch.last:
            self.yielded_to = micro_batch.stop, micro_batch.step + 1

    def train(self, micro_batch: MicroBatch) -> None:
        """Record the micro-batch of a backward."""
        self.trained = True
        if micro_batch.last:
            self.trained_to = micro_batch.stop, micro_batch.step + 1

    def end_early(self, optimizer_steps: int) -> None:
        """Mark the yielded batches as trained on if an optimizer has stepped during this iteration."""
        if not self.trained and self.micro_batch is not None and self.began_at is not None:
            self.trained = optimizer_steps > self.began_at
            self.trained_to = self.yielded_to if self.trained else None


class LoopListener(Protocol):
    """Receives the notifications of loaders. The training loop implements it.

    Attributes:
        epoch_asked: whether the script has asked a loader for its epoch.
    """

    epoch_asked: bool

    @property
    def readers(self) -> Communicator:
        """The communicator of the ranks that read different batches."""

    @property
    def shares(self) -> tuple[int, ...]:
        """The share of each of them in a micro-batch, in lowest terms."""

    def is_training(self) -> bool:
        """Return whether batches are used for training, and not for an evaluation."""

    def begin(self, iteration: Iteration, batches: Batches) -> Batches:
        """Record that an iteration begins, and return its batches, perhaps wrapped by hooks."""

    def hand_out(self, micro_batch: MicroBatch, iteration: Iteration, batch: Any) -> bool:
        """Record the next batch of an iteration, and return whether to yield it on this rank.

        Raises:
            Stopped: the run is stopped at this boundary.
        """

    def leave(self, iteration: Iteration) -> bool:
        """Record that an iteration is left before its end, and return whether it counts as an epoch."""

    def end(self, iteration: Iteration, *, complete: bool) -> None:
        """Record the end of an iteration. If it is not complete, its batches do not count."""

    def repeats(self, iteration: Iteration, made_at: str) -> bool:
        """Record the order of an iteration that was trained on. Return whether it repeats that of another loader.

        Args:
            iteration: one that has ended.
            made_at: the line of the script that made the loader: the other was made there, and trained the same models.
        """

    def follows(self) -> None:
        """Record that the script continues after the previous training iteration."""


class CurrentBatch:
    """The batch that the script works on.

    Attributes:
        is_stand_in: whether it is the stand-in of a rank without samples, and counts for nothing. An attribute, since
            compiled code that reads it must not depend on the number of samples.
    """

    __slots__ = ("is_stand_in",)

    def __init__(self) -> None:
        self.is_stand_in: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> CurrentBatch:
        """Return this object: a copy of a model is used with the same batches."""
        return self
