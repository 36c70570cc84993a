"""Knows which micro-batch a backward belongs to, and with it the weight of its loss.

Usually a script takes a batch, runs the forward and makes the step, so that a single batch is open. A script that takes
the next batch before the step on this one (to copy it ahead), or batches of several loaders, has several open. Their
losses are taken to come in the order of the batches. If that could change the weight of a loss, it is refused, unless
the script passes the batch. A script that has several open has as many from the first backward of an iteration on.
Later, more than that many mean that the script has left out the first of them. One that was left out before looks like
one taken ahead, until the data end and no backward follows.

With several loaders, a batch that a backward has closed may get its first loss later: the backward may have been for
another loader's batch only. So until its loader yields the next one, it counts as one that a loss may be of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NoReturn, TypeAlias
from weakref import WeakSet

from torch.utils.weak import WeakIdKeyDictionary

from unitrain.communication.structure import tensors
from unitrain.data.loop import CurrentBatch, Iteration
from unitrain.data.order.sharding import MicroBatch
from unitrain.errors import UsageError
from unitrain.pulse import ITERATION
from unitrain.training.windows.weights import Losses

Entry: TypeAlias = tuple[MicroBatch, Iteration]
_MOST_OPEN = 2**16  # of a loop that never trains


class OpenBatches:
    """The batches that were yielded for training and not trained on yet, in their order.

    Attributes:
        current_batch: tells whether the batch that the script works on is a stand-in.
        micro_batch: the micro-batch that was yielded for training, or trained on, last; None without a loader.
        used: whether there was such a micro-batch.
        position: the progress of the training in its data: the number of samples that were trained on, on all ranks, or
            left out by the script, and ``ITERATION`` for each iteration. It only grows.
        between_epochs: whether a training iteration has ended, and the script may still evaluate or save after it.
        begun: the latest iteration of each loader, in training mode.
    """

    def __init__(self) -> None:
        self.current_batch: CurrentBatch = CurrentBatch()
        self.micro_batch: MicroBatch | None = None
        self.used: bool = False
        self.position: int = 0
        self.between_epochs: bool = False
        self._open: deque[Entry] = deque()
        self._trained: Entry | None = None  # last
        self._ended: Iteration | None = None  # last
        self.begun: WeakSet[Iteration] = WeakSet()
        self._awaited: Entry | None = None  # was open when a loop over a loader had ended
        self._left_out = False  # whether that one was closed without a backward
        self._uneven = False  # whether the losses of some that are open may weigh differently
        self._latest: tuple[Any, Entry] | None = None  # the batch that was yielded last
        # Where several loaders are iterated over at once, or batches taken ahead; empty, and without cost, elsewhere.
        self._held: dict[object, Entry] = {}  # by loader, the last batch of each iteration in progress
        self._unsure: dict[object, Entry] = {}  # by loader, one that may not have been trained on yet
        self._known: Any = WeakIdKeyDictionary()  # by their tensors, batches that are in memory; None: of several

    @property
    def following(self) -> MicroBatch | None:
        """The micro-batch of the next backward; None if the script has to take it from a loader first."""
        return self._open[0][0] if self._open else None

    @property
    def current(self) -> Entry | None:
        """The micro-batch that a forward is of: the next one of a backward, or else the one trained on last."""
        return self._open[0] if self._open else self._trained

    @property
    def in_use(self) -> list[MicroBatch]:
        """The batches of iterations in progress that the script may be computing something from.

        In a loop that makes its steps itself, they stay open: of these, it can only use those that are in memory.
        """
        entries = [*self._held.values(), *self._open] or [*filter(None, [self._trained])]
        present = [*self._known.values(), self._latest and self._latest[1]]
        return [batch for batch, of in entries if not of.is_over and (of.trained or (batch, of) in present)]

    @property
    def trained(self) -> list[Iteration]:
        """The latest iteration of each loader, if it was trained on."""
        return [iteration for iteration in self.begun if iteration.trained]

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
        self.begun.add(iteration)
        # One entry for each open batch of the earlier iteration.
        untrained = [past for _, past in self._open if past.loader is iteration.loader and not past.trained]
        if len(untrained) > 1:
            self._forget(untrained)

    def take(self, micro_batch: MicroBatch, iteration: Iteration, batch: Any) -> None:
        """Record a batch that a loader yields for training."""
        entry = micro_batch, iteration
        if self._open or self._held or (self._latest is not None and self._latest[1][1].loader is not iteration.loader):
            self._take_another(entry, batch)
        if self._open:
            if len(self._open) >= _MOST_OPEN and not iteration.trained:
                self._open.clear()  # a loop that only looks at data, in training mode, must not fill the memory
            else:
                self._uneven = self._uneven or not _alike(self._open[-1], entry)
        self._open.append(entry)
        self._latest = batch, entry
        self.micro_batch = micro_batch
        self.used = True
        self.between_epochs = False
        self.current_batch.is_stand_in = not micro_batch.count

    def _take_another(self, entry: Entry, batch: Any) -> None:
        """Record how to know a batch that is taken beside others."""
        loader = entry[1].loader
        if self._latest is not None:
            self._remember(*self._latest)
            earlier = self._latest[1]
            if self._held or earlier[1].loader is not loader:
                self._held.setdefault(earlier[1].loader, earlier)
                self._held[loader] = entry
        elif self._held:
            self._held[loader] = entry
        self._unsure.pop(loader, None)
        self._remember(batch, entry)

    def _remember(self, batch: Any, entry: Entry) -> None:
        """Know a batch by its tensors, or as an object, as long as they are in memory."""
        for part in _identifying(batch):
            with suppress(TypeError):  # a list of strings has no weak references
                self._known[part] = entry if self._known.get(part, entry) is entry else None

    def release(self, iteration: Iteration) -> None:
        """Record that the script takes no more batches of an iteration."""
        loader = iteration.loader
        if loader in self._held and self._held[loader][1] is iteration:
            del self._held[loader]
            self._unsure.pop(loader, None)

    def end(self, iteration: Iteration) -> None:
        """Record that a training iteration has ended at the end of its data."""
        self.release(iteration)
        if self._latest is not None and self._latest[1][1] is iteration:
            self._remember(*self._latest)
            self._latest = None  # no batch stays in memory because of this
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

    def of_backward(self, losses: Losses) -> MicroBatch | None:
        """Return the micro-batch of the backward that begins, and close it; None without a loader.

        Args:
            losses: the losses, with what the script says of them. With a batch for each, the weights of those that are
                of stand-ins become 0.

        Raises:
            UsageError: it is not clear which batch a loss is of, and it matters.
        """
        if losses.batches:
            return self._of_batches(losses)
        weighted = bool(losses.weights)
        if not self._open:
            if self._held:
                self._check(self._held.values(), weighted)
            return self.micro_batch
        if len(self._open) > 1 or self._unsure:
            self._leave_out()
            first = self._open[0]
            loaders = {iteration.loader for _, iteration in self._open}
            unsure = [entry for loader, entry in self._unsure.items() if loader not in loaders]
            self._check([*(self._open if self._uneven else [first]), *unsure], weighted)
            self._uneven = self._uneven and weighted
            if unsure:
                self._unsure[first[1].loader] = first
        micro_batch, iteration = self._trained = self._open.popleft()
        self._train(micro_batch, iteration)
        if self._open:
            self._close_others(iteration)
        if len(losses.each) > 1 and self._known:
            self._check_kept()
        self.micro_batch = micro_batch
        return micro_batch

    def _check_kept(self) -> None:
        """Raise UsageError if losses may also be of batches that the script has kept, as ``itertools.cycle`` does.

        That matters if one of them is a stand-in, and another is not: the weights of the losses follow from it.
        """
        assert self._trained is not None
        micro_batch, iteration = self._trained
        for entry in self._known.values():
            used = entry is not None and entry[1].trained and entry[1].loader is not iteration.loader
            if used and (not entry[0].count) != (not micro_batch.count):
                self._refuse(micro_batch, entry[0])

    def _of_batches(self, losses: Losses) -> MicroBatch:
        """Return the micro-batch of a backward, given the batch by the script, or one for each loss."""
        of_losses = [self._find(batch) for batch in losses.batches]
        entries = list({id(entry): entry for each in of_losses for entry in each}.values())
        if len(entries) == 1:
            of_losses = [entries] * len(losses.batches)  # parts of it that are no tensors are not known
        if not all(of_losses):
            raise UsageError(
                "batch= is not a batch that a loader of this strategy has yielded for training: pass the batch that "
                "the loss is of as the loader yielded it, or a tensor of it; with a list of losses, one for each."
            )
        if any(len(each) > 1 for each in of_losses):
            self._check(entries, weighted=bool(losses.weights))
        if len({micro_batch.last for micro_batch, _ in entries}) > 1:
            raise UsageError(
                "the batches of these losses are of loaders with different numbers of micro-batches in a step, and "
                "only some end an accumulation window: give all loaders the same accumulate or micro_batch_size, and "
                "drop_last=True, since the last step of an epoch may have fewer."
            )
        for number, each in enumerate(of_losses if len(of_losses) > 1 else ()):
            if not each[0][0].count:
                losses.weights[number] = 0.0
        for entry in entries:
            self._unsure.pop(entry[1].loader, None)
            # Those of its loader that were taken before it were left out.
            for batch in [batch for batch in self._open if batch[1] is entry[1] and entry in self._open]:
                if batch[0].start <= entry[0].start:
                    self._close(batch)
        self._trained = max(entries, key=lambda entry: entry[0].count)
        self.micro_batch = self._trained[0]
        return self.micro_batch

    def _find(self, batch: Any) -> list[Entry]:
        """Return the batches that loaders have yielded and that an object is, or has tensors of."""
        if self._latest is not None:
            if batch is self._latest[0]:
                return [self._latest[1]]
            self._remember(*self._latest)
        entries = []
        for part in _identifying(batch):
            with suppress(TypeError):
                entry = self._known.get(part)
                if entry is not None and entry not in entries:
                    entries.append(entry)
        return entries

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

    def _close(self, batch: Entry) -> None:
        """Record a batch as trained on, although no backward was for it: its samples must not come again."""
        self._train(*batch)
        self._open.remove(batch)

    def train_on_all(self) -> None:
        """Record that the script has trained on all open batches, without a backward of the strategy."""
        for batch in list(self._open):
            self._close(batch)
            self._trained = batch
        self._unsure.clear()

    def _train(self, micro_batch: MicroBatch, iteration: Iteration) -> None:
        """Move the position past a micro-batch, and past those before it that the script has left out."""
        if not iteration.trained:
            self.position += ITERATION
            iteration.reached = micro_batch.start
        self.position += micro_batch.stop - iteration.reached
        iteration.reached = micro_batch.stop
        iteration.train(micro_batch)

    def _close_others(self, iteration: Iteration) -> None:
        """Close the first batch of each other loader: the loss is of one of each, or of any of them."""
        seen = {iteration.loader}
        for batch in list(self._open):
            if batch[1].loader not in seen:
                seen.add(batch[1].loader)
                self._unsure[batch[1].loader] = batch
                self._close(batch)
        if len(seen) > 1 and self._trained is not None:
            self._unsure[iteration.loader] = self._trained

    def _check(self, entries: Iterable[Entry], weighted: bool) -> None:
        """Raise UsageError if a loss would be treated in another way if it were of another one of these batches."""
        first, *others = entries
        for later in others:
            if not _alike(first, later, weighted=weighted):
                self._refuse(first[0], later[0])

    @staticmethod
    def _refuse(first: MicroBatch, later: MicroBatch) -> NoReturn:
        raise UsageError(
            "several batches were taken from loaders before this backward, and it is not clear which one the loss is "
            f"of: {_described(first)} in one, {_described(later)} in another. Pass the batch, as the loader yielded "
            "it: step(loss, optimizer, batch=batch). If the loss is of several, pass a list of losses, and lists "
            "batch= and weight= with the batch and the number of samples of each."
        )


def _identifying(batch: Any) -> list[Any]:
    """Return the objects by which a batch is known."""
    return [*tensors(batch, opened=True)] or [batch]


def _alike(first: Entry, later: Entry, *, weighted: bool = False) -> bool:
    """Return whether a loss of either batch weighs the same on this rank, and ends its window or not.

    Args:
        first: a batch.
        later: another, perhaps of the same loader: then their order is known.
        weighted: whether the script gives weights, so that it only matters whether a batch is a stand-in.
    """
    (one_batch, iteration), (other, other_iteration) = first, later
    if iteration.loader is not other_iteration.loader and one_batch.last != other.last:
        return False
    if weighted:
        return (not one_batch.count) == (not other.count)
    return one_batch.count * other.window == other.count * one_batch.window  # count / window, exactly


def _described(micro_batch: MicroBatch) -> str:
    """Return the size of a micro-batch for a message."""
    ends = "" if micro_batch.last else ", and more micro-batches follow"
    return f"{micro_batch.count} of {micro_batch.window} samples of a step are on this rank{ends}"
