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
        position: the progress of the training in its data: the number of samples that were trained on, on all ranks, or
            left out by the script, and ``ITERATION`` for each iteration. It only grows.
        between_epochs: whether a training iteration has ended, and the script may still evaluate or save after it.
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
    def trained(self) -> list[Iteration]:
        """The latest iteration of each loader, if it was trained on."""
        return [iteration for iteration in self._begun if iteration.trained]

    @property
    def last_is_open(self) -> bool:
        """Whether the last batch of an iteration that has ended is open."""
        return bool(self._open) and self._open[0][1] is self._ended

    @property
    def has_left_out(self) -> bool:
        """Whether no backward has followed for a batch that was open when the last iteration ended."""
        return self._left_out or (self._awaited is not None and self._awaited in self._open)

    def begin(self, iteration: Iteration) -> None:
        """Record that a training iteration begins.

        Of the iteration before it over the same loader, a batch may still be open. If that has trained on none of its
        batches, it was no training, unless it had a single one.

        Args:
            iteration: the new iteration.
        """
        self._begun.add(iteration)
        # One entry for each open batch of the earlier iteration.
        untrained = [past for _, past in self._open if past.loader is iteration.loader and not past.trained]
        if len(untrained) > 1:
            self._forget(untrained)

    def take(self, micro_batch: MicroBatch, iteration: Iteration) -> None:
        """Record a batch that a loader yields for training."""
        if self._open:
            if len(self._open) >= _MOST_OPEN and not iteration.trained:
                self._open.clear()  # a loop that only looks at data, in training mode, must not fill the memory
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
        for batch in [batch for batch in self._open if batch[1] in iterations]:
            self._open.remove(batch)  # in place: modules are empty when the interpreter exits

    def of_backward(self, *, weighted: bool) -> MicroBatch | None:
        """Return the micro-batch of the backward that begins, and close it; None without a loader.

        Args:
            weighted: whether the script gives the weight of its loss.

        Raises:
            UsageError: the losses of several open batches weigh differently, and the script gives no weight.
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
        of_loader = [batch for batch in self._open if batch[1].loader is iteration.loader]
        if not iteration.trained:
            iteration.open_at_once = len(of_loader)
        for batch in of_loader[: len(of_loader) - iteration.open_at_once]:
            self._left_out = self._left_out or batch is self._awaited
            self._close(batch)

    def _close(self, batch: tuple[MicroBatch, Iteration]) -> None:
        """Record a batch as trained on, although no backward was for it: its samples must not come again."""
        self._train(*batch)
        self._open.remove(batch)

    def _train(self, micro_batch: MicroBatch, iteration: Iteration) -> None:
        """Move the position past a micro-batch, and past those before it that the script has left out."""
        if not iteration.trained:
            self.position += ITERATION
            iteration.reached = micro_batch.start
        self.position += micro_batch.stop - iteration.reached
        iteration.reached = micro_batch.stop
        iteration.train(micro_batch)

    def _close_others(self, iteration: Iteration) -> None:
        """Close the first batch of each other loader: the loss is of one of each."""
        seen = {iteration.loader}
        for batch in list(self._open):
            if batch[1].loader not in seen:
                seen.add(batch[1].loader)
                self._close(batch)

    def _check_weights(self, weighted: bool) -> None:
        """Raise UsageError if another order of the open batches would give the loss another weight."""
        first = self._open[0][0]
        for later, _ in self._open:
            if not (_both_count(first, later) if weighted else _weigh_the_same(first, later)):
                raise UsageError(
                    f"several batches were taken from loaders before this backward, and it is not clear which one the "
                    f"loss is of: {first.count} of {first.window} samples of a step are on this rank in one, "
                    f"{later.count} of {later.window} in another. Call step() for each batch before taking the next "
                    "one; or pass "
                    "drop_last=True and batch sizes that are multiples of the number of processes (of the sum of their "
                    "shares); or pass weight= to step()."
                )
        self._uneven = weighted


def _weigh_the_same(first: MicroBatch, later: MicroBatch) -> bool:
    """Return whether this rank's loss weighs the same for both micro-batches."""
    return first.count * later.window == later.count * first.window  # count / window, exactly


def _both_count(first: MicroBatch, later: MicroBatch) -> bool:
    """Return whether both are stand-ins, or neither is."""
    return (not first.count) == (not later.count)
