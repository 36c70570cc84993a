"""Knows which micro-batch a backward belongs to, and with it the weight of its loss.

Usually a script takes a batch, runs the forward and makes the step, so that a single batch is open. A script that takes
the next batch before the step on this one (to copy it ahead), or batches of several loaders, has several open. Their
losses are taken to come in the order of the batches. If that could change the weight of a loss, it is refused. A script
that has several open has as many from the first backward of an iteration on. Later, more than that many mean that the
script has left out the first of them. One that was left out before looks like one taken ahead, until the data end and
no backward follows.
"""

from __future__ import annotations

from collections import deque
from weakref import WeakSet

from unitrain.data.loop import CurrentBatch, Iteration
from unitrain.data.order.sharding import MicroBatch
from unitrain.errors import UsageError
from unitrain.pulse import ITERATION

_MOST_OPEN = 2**16  # of a loop that never trains


class OpenBatches:
    """The batches that were yielded for training and not trained on yet, in their order.

    Attributes:
        current_batch: tells whether the batch that the script works on is a stand-in.
        micro_batch: the micro-batch that was yielded for training, or trained on, last; None without a loader.
        position: how far the training has come in its data: the samples that were trained on, on all ranks, or left out
            by the script, and ``ITERATION`` for each iteration. It only grows.
        between_epochs: whether a training iteration has ended, and what follows it in the script is not done yet.
    """

    def __init__(self) -> None:
        self.current_batch: CurrentBatch = CurrentBatch()
        self.micro_batch: MicroBatch | None = None
        self.position: int = 0
        self.between_epochs: bool = False
        self._open: deque[tuple[MicroBatch, Iteration]] = deque()
        self._trained: tuple[MicroBatch, Iteration] | None = None  # last
        self._ended: Iteration | None = None  # last
        self._begun: WeakSet[Iteration] = WeakSet()
        self._awaited: tuple[MicroBatch, Iteration] | None = None  # was open when a loop over a loader had ended
        self._left_out = False  # whether that one was closed without a backward
        self._uneven = False  # whether the losses of some that are open may weigh differently

    @property
    def following(self) -> MicroBatch | None:
        """The micro-batch of the next backward; None if the script has to take it from a loader first."""
        return self._open[0][0] if self._open else None

    @property
    def current(self) -> tuple[MicroBatch, Iteration] | None:
        """The micro-batch that a forward is of: the next one of a backward, or else the one trained on last."""
        return self._open[0] if self._open else self._trained

    @property
    def trained_loaders(self) -> list[object]:
        """What stands for the loaders whose latest iterations were trained on."""
        return [iteration.loader for iteration in self._begun if iteration.trained]

    @property
    def last_is_open(self) -> bool:
        """Whether the last batch of an iteration that has ended is open."""
        return bool(self._open) and self._open[0][1] is self._ended

    @property
    def one_is_left_out(self) -> bool:
        """Whether no backward has followed for a batch that was open when the last iteration ended."""
        return self._left_out or (self._awaited is not None and self._awaited in self._open)

    def begin(self, iteration: Iteration) -> None:
        """Record that a training iteration begins.

        Of the iteration before it over the same loader, a batch may still be open. If that has trained on none of its
        batches, it was no training, unless it had a single one.
        """
        self._begun.add(iteration)
        before = [its for _, its in self._open if its.loader is iteration.loader and not its.trained]
        if len(before) > 1:
            self._forget(before)

    def take(self, micro_batch: MicroBatch, iteration: Iteration) -> None:
        """Record a batch that a loader yields for training."""
        if self._open:
            if len(self._open) >= _MOST_OPEN and not iteration.trained:
                self._open.clear()
            else:
                self._uneven = self._uneven or not _weigh_the_same(self._open[-1][0], micro_batch)
        self._open.append((micro_batch, iteration))
        self.micro_batch = micro_batch
        self.between_epochs = False
        self.current_batch.is_stand_in = not micro_batch.count

    def end(self, iteration: Iteration) -> None:
        """Record that a training iteration has ended at the end of its data."""
        self.between_epochs = True
        self._ended = iteration
        self._awaited = self._open[0] if self._open and iteration.trained else None
        if not self._open:
            self.micro_batch = None
            self.current_batch.is_stand_in = False

    def drop(self, iteration: Iteration) -> None:
        """Forget the batches of an iteration that does not count."""
        if self._open:
            self._forget([iteration])

    def _forget(self, iterations: list[Iteration]) -> None:
        for one in [one for one in self._open if one[1] in iterations]:
            self._open.remove(one)  # in place: modules are empty when the interpreter exits

    def of_backward(self, *, weighted: bool) -> MicroBatch | None:
        """Return the micro-batch of the backward that begins. It is not open any more; None without a loader.

        UsageError is raised if the losses of several open batches weigh differently, unless the script gives the
        weight.
        """
        if not self._open:
            return self.micro_batch
        if len(self._open) > 1:
            self._leave_out()
            if self._uneven:
                self._check_weights(weighted)
        micro_batch, iteration = self._trained = self._open.popleft()
        self._train(micro_batch, iteration)
        if self._open:
            self._close_others(iteration)
        self.micro_batch = micro_batch
        return micro_batch

    def _leave_out(self) -> None:
        """Close the batches that the script has left out."""
        iteration = self._open[0][1]
        if iteration.trained and len(self._open) <= iteration.open_at_once:
            return
        of_loader = [one for one in self._open if one[1].loader is iteration.loader]
        if not iteration.trained:
            iteration.open_at_once = len(of_loader)
        for one in of_loader[: len(of_loader) - iteration.open_at_once]:
            self._left_out = self._left_out or one is self._awaited
            self._close(one)

    def _close(self, one: tuple[MicroBatch, Iteration]) -> None:
        self._train(*one)
        self._open.remove(one)

    def _train(self, micro_batch: MicroBatch, iteration: Iteration) -> None:
        if not iteration.trained:
            self.position += ITERATION
            iteration.reached = micro_batch.start
        self.position += micro_batch.stop - iteration.reached
        iteration.reached = micro_batch.stop
        iteration.train(micro_batch)

    def _close_others(self, iteration: Iteration) -> None:
        """Close the first batch of each other loader: the loss is of one of each."""
        seen = {iteration.loader}
        for one in list(self._open):
            if one[1].loader not in seen:
                seen.add(one[1].loader)
                self._close(one)

    def _check_weights(self, weighted: bool) -> None:
        one = self._open[0][0]
        for other, _ in self._open:
            if not (_both_count(one, other) if weighted else _weigh_the_same(one, other)):
                raise UsageError(
                    f"several batches were taken from loaders before this backward, and it is not clear which one the "
                    f"loss is of: {one.count} of {one.window} samples of a step are on this rank in one, {other.count} "
                    f"of {other.window} in another. Call step() for each batch before taking the next one; or pass "
                    "drop_last=True and batch sizes that are multiples of the number of processes (of the sum of their "
                    "shares); or pass weight= to step()."
                )
        self._uneven = weighted


def _weigh_the_same(one: MicroBatch, other: MicroBatch) -> bool:
    """Return whether this rank's loss weighs the same for both micro-batches."""
    return one.count * other.window == other.count * one.window


def _both_count(one: MicroBatch, other: MicroBatch) -> bool:
    """Return whether both are stand-ins, or neither is."""
    return (not one.count) == (not other.count)
