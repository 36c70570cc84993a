"""Ranks whose streams differ in length agree, step by step, on how much there is and when there is no more.

For every optimizer step, one sum over the ranks tells how many samples each of its micro-batches has: 0 everywhere is
the end. It is begun while the step before is computed and read when that is done, so that nobody waits for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from unitrain.communicator import Communicator
from unitrain.data.sharding import EpochPlan, MicroBatch
from unitrain.data.stream import Piece
from unitrain.errors import DataError

# Ranks make their loaders in the same order, so a number names the same one on all.
_numbers = itertools.count()


class Agreement:
    """The sums of one loader.

    Args:
        communicator: of this process; all ranks agree.
        plan: the steps' sizes.
    """

    def __init__(self, communicator: Communicator, plan: EpochPlan) -> None:
        self._communicator = communicator
        self._plan = plan
        self._name = f"stream.{next(_numbers)}"
        self._asked: Callable[[], list[int]] | None = None
        # On a GPU, to read a sum on the stream that computes would be to wait for the computation.
        self._stream = torch.cuda.Stream(communicator.device) if communicator.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def micro_batches(self, pieces: Iterator[Piece], start: int, step: int) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this rank's pieces, and empty batches once it has none, for as long as any rank has samples.

        Args:
            pieces: what this rank reads, from the beginning of the epoch.
            start: samples of the epoch, of all ranks, that were consumed before.
            step: in how many steps they were; this rank's part of these is dropped.
        """
        if self._asked is not None:
            self._asked()  # of an iteration that was broken off
        source = _Source(pieces)
        accumulate, opening = self._plan.accumulate, True
        ahead = list(itertools.islice(source, step * accumulate, (step + 1) * accumulate))
        self._ask(ahead, source)
        while sizes := self._sizes():
            window, current, ahead = sum(sizes), ahead, []
            for i, size in enumerate(sizes):
                last = i == len(sizes) - 1
                # The next step is read as this one goes on, and asked for while its last micro-batch is computed.
                ahead += itertools.islice(source, accumulate - len(ahead) if last else 1)
                if last:
                    self._ask(ahead, source)
                count, batch = (current[i].samples, current[i].batch) if i < len(current) else (0, source.nothing())
                yield (
                    MicroBatch(start, start + size, count, window, step, i == 0, last, opening=opening and i == 0),
                    batch,
                )
                start += size
            step, opening = step + 1, False

    def _ask(self, pieces: list[Piece], source: _Source) -> None:
        counts = [piece.samples for piece in pieces]
        counts += [0] * (self._plan.accumulate - len(counts))
        self._asked = self._sum([*counts, not source.began])

    def _sizes(self) -> list[int]:
        """Return how many samples the step's micro-batches have, over all ranks; nothing at the end."""
        assert self._asked is not None
        *sizes, without = self._asked()
        self._asked = None
        sizes = [size for size in sizes if size]
        if not sizes or (self._plan.drop_last and sum(sizes) < self._plan.global_batch):
            return []
        if without:
            raise DataError(
                f"{without} of {self._plan.world_size} ranks have no sample of this stream at all: it needs as many "
                "shards as there are ranks, or more."
            )
        return sizes

    def _sum(self, numbers: list[int]) -> Callable[[], list[int]]:
        """Begin to sum numbers over the ranks; return what waits for the sums."""
        if self._plan.world_size == 1:
            return lambda: numbers
        with self._apart():
            tensor = torch.tensor(numbers, device=self._communicator.device)
            wait = self._communicator.all_reduce_async(tensor, "sum", self._name)

        def sums() -> list[int]:
            with self._apart(), self._communicator.pulse.within("the next batch"):
                wait()
                summed: list[int] = tensor.tolist()
                return summed

        return sums

    def _apart(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class _Source:
    """This rank's pieces that have samples."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces
        self._nothing: Any = None
        self.began = False

    def __iter__(self) -> _Source:
        return self

    def __next__(self) -> Piece:
        for piece in self._pieces:
            self.began = True
            if piece.samples:
                return piece
            self._nothing = piece.batch
        raise StopIteration

    def nothing(self) -> Any:
        """Return the empty batch with which a rank that has read all takes part."""
        if isinstance(self._nothing, DataError):
            raise self._nothing
        return self._nothing
