"""Agrees, step by step, on the sizes of micro-batches and the end of an epoch, for shards of different lengths.

For every optimizer step, one sum over the ranks gives the number of samples in each of its micro-batches. If it is 0,
the group of shards of this turn has ended (see ``dealing.py``), and the epoch ends when all have. The sum is started
while the previous step is computed, and read when that is done, so that no rank waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from unitrain.communication.communicator import Communicator
from unitrain.communication.counts import CountReduction
from unitrain.data.order.sharding import EpochPlan, MicroBatch
from unitrain.data.reading.dealing import Dealing
from unitrain.data.reading.stream import Piece, Turn
from unitrain.errors import DataError

# All ranks make their loaders in the same order, so a count identifies a loader.
_numbers = itertools.count()


class Agreement:
    """The agreement of all ranks for one loader.

    Args:
        communicator: sums over the ranks. Every rank must make its agreements in the same order.
        plan: has the sizes of the steps.
    """

    def __init__(self, communicator: Communicator, plan: EpochPlan) -> None:
        self._communicator = communicator
        self._plan = plan
        self._sums = CountReduction(communicator, "sum", f"stream.{next(_numbers)}")
        self._asked: Callable[[], list[int]] | None = None

    def micro_batches(
        self, turns: Iterator[Turn], dealing: Dealing, start: int, step: int
    ) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this rank's micro-batches, and stand-ins after its last, as long as any rank has samples.

        ``turns`` begin with turn ``step``. ``start`` samples were consumed before, over all ranks. The steps are
        numbered as the turns are. Collective: each step takes one sum over the ranks, for which it waits when the next
        batch is asked for.

        Raises:
            DataError: a rank has no samples at all; on every rank.
        """
        if self._asked is not None:
            self._awaited()  # of an iteration that ended early
        plan = self._plan
        groups = dealing.groups
        # Of the rank that keeps the fewest samples of a full turn: if it is enough, every rank has some in each cut.
        least = min(dealing.kept(rank, plan.world_size) for rank in range(plan.world_size))
        source = _Source(turns)
        ended: set[int] = set()  # groups
        opening = True
        current = self._ask(source, step)
        while True:
            sizes = self._sizes()
            window = sum(sizes)
            if not window or (plan.drop_last and window < plan.global_batch):
                ended.add(step % groups)
                if len(ended) == groups:
                    return
            following = next(number for number in itertools.count(step + 1) if number % groups not in ended)
            if step % groups in ended:  # a turn without samples, or with too few: none of it is yielded
                step, current = following, self._ask(source, following)
                continue
            filled = [i for i, size in enumerate(sizes) if size]
            for i in filled:
                last = i == filled[-1]
                if last:  # the next step is read, and its sum started, before the last micro-batch
                    ahead = self._ask(source, following)
                count, batch = (current[i].samples, current[i].batch) if i < len(current) else (0, None)
                micro_batch = MicroBatch(
                    start, start + sizes[i], count, window, step, i == filled[0], last,
                    opening=opening, everywhere=least >= plan.accumulate and window == plan.global_batch,
                )  # fmt: skip
                yield micro_batch, batch if count else source.stand_in
                start, opening = start + sizes[i], False
            step, current = following, ahead

    def _ask(self, source: _Source, turn: int) -> list[Piece]:
        """Start the sum of a turn. Return this rank's pieces of it."""
        pieces = source.read(turn)
        counts = [piece.samples for piece in pieces]
        counts += [0] * (self._plan.accumulate - len(counts))
        # With the sizes, the number of ranks that have not had a sample yet, which is an error if others have.
        values = [*counts, source.stand_in is None]
        self._asked = self._sums.start(values) if self._plan.world_size > 1 else lambda: values
        return pieces

    def _sizes(self) -> list[int]:
        """Return the sizes of the step's micro-batches, over all ranks."""
        *sizes, empty_ranks = self._awaited()
        self._asked = None
        if any(sizes) and empty_ranks:
            raise DataError(
                f"{empty_ranks} of {self._plan.world_size} ranks have no samples of this dataset: it must have at "
                "least as many shards as there are ranks."
            )
        return sizes

    def _awaited(self) -> list[int]:
        """Wait for the sum that was started last. Return it."""
        assert self._asked is not None
        with self._communicator.collectives.pulse.within("the next batch"):
            return self._asked()


class _Source:
    """Reads this rank's turns.

    Attributes:
        stand_in: the batch of a rank that has no samples of a micro-batch; None before there was a sample.
    """

    def __init__(self, turns: Iterator[Turn]) -> None:
        self._turns = turns
        self._next: Turn | None = None
        self.stand_in: Any = None

    def read(self, number: int) -> list[Piece]:
        """Return this rank's pieces of a turn; none if its shards have ended. Turns before it are skipped."""
        while self._next is None or self._next.number < number:
            self._next = next(self._turns, None)
            if self._next is None:
                return []
            self._note(self._next)
        return self._next.pieces if self._next.number == number else []

    def _note(self, turn: Turn) -> None:
        """Keep the stand-in of a turn, for micro-batches without samples of this rank."""
        for piece in turn.pieces:
            if piece.batch is not None and (self.stand_in is None or not piece.samples):
                self.stand_in = piece.batch
