"""What a loader and the training loop tell each other about an iteration."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch.optim import optimizer as torch_optimizer

from unitrain.data.order.sharding import MicroBatch

Batches = Iterator[tuple[MicroBatch, Any]]
"""Micro-batches, and what a loader yields for them."""


class OptimizerSteps:
    """Counts the steps of all optimizers of the process, for loops that don't use ``strategy.step``.

    Attributes:
        count: their number so far.
    """

    def __init__(self) -> None:
        self.count: int = 0
        torch_optimizer.register_optimizer_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.count += 1


@functools.cache
def optimizer_steps() -> OptimizerSteps:
    """Return the one counter of the process."""
    return OptimizerSteps()


class Iteration:
    """One iteration over a loader.

    Args:
        loader: an object that stands for the loader.
        order: the seed and the epoch of its order; None if positions in it differ between worlds.

    Attributes:
        loader: that object.
        order: see above.
        micro_batch: the micro-batch that was yielded last; None before the first.
        yielded_to: how many samples and steps of the epoch were consumed at the end of the last window that was
            yielded; None before that.
        trained: whether one of its batches was used in a backward. If it ends before that, as in
            ``next(iter(loader))``, it does not count as an epoch.
        trained_to: as ``yielded_to``, for the last window that was trained on.
        reached: position in the epoch's order up to which its samples were trained on, or left out by the script.
        open_at_once: number of batches of the loader that were open at its first backward.
        gathers: whether ``gather`` was called for a batch of it, in an evaluation.
        began_at: how many steps all optimizers had made when it began, for training; None in an evaluation.
    """

    __slots__ = (
        "__weakref__", "began_at", "gathers", "loader", "micro_batch", "open_at_once", "order", "reached", "trained",
        "trained_to", "yielded_to",
    )  # fmt: skip

    def __init__(self, loader: object, order: tuple[int, int] | None = None) -> None:
        self.loader: object = loader
        self.order: tuple[int, int] | None = order
        self.micro_batch: MicroBatch | None = None
        self.yielded_to: tuple[int, int] | None = None
        self.trained: bool = False
        self.trained_to: tuple[int, int] | None = None
        self.reached: int = 0
        self.open_at_once: int = 1
        self.gathers: bool = False
        self.began_at: int | None = None

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
        """Count what was yielded as trained on if an optimizer has stepped since the beginning."""
        if not self.trained and self.micro_batch is not None and self.began_at is not None:
            self.trained = optimizer_steps > self.began_at
            self.trained_to = self.yielded_to if self.trained else None


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
