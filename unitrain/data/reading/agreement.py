"""Agrees, step by step, on the sizes of micro-batches and the end of an epoch, for shards of different lengths.

For every optimizer step, one sum over the ranks gives the number of samples in each of its micro-batches; 0 in all is
the end. The sum is started while the previous step is computed, and read when that is done, so that no rank waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from unitrain.communication.communicator import Communicator
from unitrain.communication.counts import CountReduction
from unitrain.data.order.sharding import EpochPlan, MicroBatch
from unitrain.data.reading.stream import Piece
from unitrain.errors import DataError

# All ranks make their loaders in the same order, so a count identifies a loader.
_numbers = itertools.count()


class Agreement:
    """The agreement of all ranks for one loader."""

    def __init__(self, communicator: Communicator, plan: EpochPlan) -> None:
        self._communicator = communicator
        self._plan = plan
        self._sums = CountReduction(communicator, "sum", f"stream.{next(_numbers)}")
        self._asked: Callable[[], list[int]] | None = None

    def micro_batches(self, pieces: Iterator[Piece], start: int, step: int) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this rank's micro-batches, and stand-ins after its last, as long as any rank has samples.

        ``pieces`` come from the beginning of the epoch. ``start`` samples were consumed before, over all ranks, in
        ``step`` steps, and this rank's part of them is skipped.
        """
        if self._asked is not None:
            self._asked()  # of an iteration that ended early
        source = _Source(pieces)
        accumulate, opening = self._plan.accumulate, True
        ahead = list(itertools.islice(source, step * accumulate, (step + 1) * accumulate))
        self._ask(ahead, source)
        while sizes := self._sizes():
            window, current, ahead = sum(sizes), ahead, []
            for i, size in enumerate(sizes):
                last = i == len(sizes) - 1
                # The next step is read during this one, and its sum started before the last micro-batch.
                ahead += itertools.islice(source, accumulate - len(ahead) if last else 1)
                if last:
                    self._ask(ahead, source)
                count, batch = (current[i].samples, current[i].batch) if i < len(current) else (0, source.stand_in)
                micro_batch = MicroBatch(
                    start, start + size, count, window, step, i == 0, last,
                    opening=opening and i == 0, everywhere=size * accumulate == self._plan.global_batch,
                )  # fmt: skip
                yield micro_batch, batch
                start += size
            step, opening = step + 1, False

    def _ask(self, pieces: list[Piece], source: _Source) -> None:
        counts = [piece.samples for piece in pieces]
        counts += [0] * (self._plan.accumulate - len(counts))
        self._asked = self._sum([*counts, not source.began])

    def _sizes(self) -> list[int]:
        """Return the sizes of the step's micro-batches, over all ranks; an empty list at the end."""
        assert self._asked is not None
        *sizes, empty_ranks = self._asked()
        self._asked = None
        sizes = [size for size in sizes if size]
        if not sizes or (self._plan.drop_last and sum(sizes) < self._plan.global_batch):
            return []
        if empty_ranks:
            raise DataError(
                f"{empty_ranks} of {self._plan.world_size} ranks have no samples of this dataset: it must have at "
                "least as many shards as there are ranks."
            )
        return sizes

    def _sum(self, values: list[int]) -> Callable[[], list[int]]:
        """Start to sum values over the ranks. Return a function that waits for the sums."""
        if self._plan.world_size == 1:
            return lambda: values
        sums = self._sums.start(values)

        def waited() -> list[int]:
            with self._communicator.pulse.within("the next batch"):
                return sums()

        return waited


class _Source:
    """Iterates over this rank's pieces that have samples.

    Attributes:
        stand_in: the batch of a rank after its shard has ended, before other shards have.
        began: whether there was a piece.
    """

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces
        self.stand_in: Any = None
        self.began = False

    def __iter__(self) -> _Source:
        return self

    def __next__(self) -> Piece:
        for piece in self._pieces:
            self.began = True
            if piece.samples:
                return piece
            self.stand_in = piece.batch
        raise StopIteration
