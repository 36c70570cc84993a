"""Reads this rank's batches of an iterable dataset, in a worker process or in the main process.

A stream is read in one of two ways:

- ``WholeStream``: every rank reads all samples and keeps its part, as with a map-style dataset. The global batches are
  the same with any number of ranks, and every rank finds the end by itself.
- ``ShardedStream``: every rank and worker reads different shards; see ``dealing.py``. Shards differ in length, so that
  the ranks must agree on the end; see ``agreement.py``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice, pairwise
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from unitrain.data.order.sharding import EpochPlan, MicroBatch
from unitrain.data.reading.dealing import (
    Beginning,
    Dealing,
    Reader,
    Seek,
    as_worker,
    environment,
    is_stateful,
    opened,
    state_of,
)
from unitrain.data.reading.fetching import Collate
from unitrain.data.reading.fingerprint import sample_digest
from unitrain.rng import SeparateGenerators, derived_seed, seed_generators


class Piece(NamedTuple):
    """A batch that a worker has read."""

    micro_batch: MicroBatch | None
    """The micro-batch that the batch belongs to; None if the reader does not know it."""
    samples: int
    """Number of samples in the batch; 0 for a stand-in."""
    batch: Any
    """The collated batch; None for a micro-batch without samples or stand-in."""
    shared: int
    """A digest of the stream's first sample, by which ranks and workers notice that they read different data."""
    seeks: Sequence[Seek] = ()
    """Where the stream continues after the step."""
    beginnings: Sequence[Beginning] = ()


class Turn(NamedTuple):
    """One rank's part of the micro-batches of a turn."""

    number: int
    """See ``dealing.py``."""
    pieces: list[Piece]
    seeks: Sequence[Seek]
    beginnings: Sequence[Beginning]


@dataclass(eq=False)
class _Stream(IterableDataset[Any]):
    """Base class of the two ways: the dataset of torch's DataLoader, which is copied into each worker.

    Attributes:
        dataset: the script's dataset.
        plan: has the sizes of the steps, and this rank.
        collate: makes a batch of a list of samples.
        seeks: where a resumed epoch continues. Of a sharded stream, shards without one are read from their beginning.
    """

    dataset: Any
    plan: EpochPlan
    collate: Collate
    seeks: Sequence[Seek]

    def __post_init__(self) -> None:
        # Persistent workers have a copy of this object, so what changes between epochs is in shared memory.
        self._position = torch.zeros(3, dtype=torch.int64)
        self._position.share_memory_()  # type: ignore[no-untyped-call]

    def begin(self, seed: int, epoch: int, start: int) -> None:
        """Set the position of the next iteration: an epoch, from its sample (if sharded, turn) ``start`` on.

        Called in the main process; workers see it in shared memory when their iteration begins.
        """
        self._position[:] = torch.tensor([seed, epoch, start])

    def __iter__(self) -> Iterator[Any]:
        seed, epoch, start = self._position.tolist()
        if callable(getattr(self.dataset, "set_epoch", None)):
            # The copy in a worker, which no call of the script reaches.
            self.dataset.set_epoch(epoch)
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        stream_seed = self._seed(seed, epoch, worker)
        if info is None:
            generators: Callable[[], AbstractContextManager[None]] = SeparateGenerators(stream_seed).in_use
        else:  # a worker's generators serve nothing else
            seed_generators(stream_seed)
            generators = nullcontext
        pieces = self._pieces(epoch, start, worker, workers)
        while True:
            # Around each read alone: between two of them, the script draws from the same generators.
            with generators(), self._surroundings():
                piece = next(pieces, _NOTHING)
            if piece is _NOTHING:
                return
            yield piece

    @abstractmethod
    def _seed(self, seed: int, epoch: int, worker: int) -> int:
        """Return the seed of the generators that the dataset draws from."""

    @abstractmethod
    def _surroundings(self) -> AbstractContextManager[None]:
        """Return a context manager for reading the dataset: the surroundings in which it shards itself, or not."""

    @abstractmethod
    def _pieces(self, epoch: int, start: int, worker: int, workers: int) -> Iterator[Any]:
        """Yield the pieces of an epoch from ``start`` on, as one of ``workers`` workers."""


class WholeStream(_Stream):
    """Reads all samples and keeps this rank's part. With W workers, each yields every W-th micro-batch.

    Every worker reads all samples as well, so more workers speed up collating only. If the dataset has a state, its
    random numbers depend on the step. The states of ``seeks`` are pairs: the number of samples until there, and the
    state of the dataset.
    """

    def _seed(self, seed: int, epoch: int, worker: int) -> int:
        return derived_seed("stream", seed, epoch)  # every rank and worker must read the same samples

    def _surroundings(self) -> AbstractContextManager[None]:
        return as_worker(None)

    def _pieces(self, epoch: int, start: int, worker: int, workers: int) -> Iterator[Piece]:
        plan, edges = self.plan, self.plan.edges()
        needed: Container[int] = range(plan.global_batch)
        if plan.division is None:  # the first sample of a micro-batch is the stand-in of a rank that has none of it
            full = plan.window(0, range(plan.global_batch), edges, 0, False)
            needed = frozenset(i for part in full for i in (part.start, *part.positions(plan.part).tolist()))
        position, state = next((seek.state for seek in self.seeks if seek.state[0] <= start), (0, None))
        dataset, samples = opened(self.dataset, state)
        seeking = is_stateful(dataset)
        if seeking:
            self._seed_from(position)
        first_sample = next(samples, _NOTHING)
        if first_sample is _NOTHING:
            return
        first = sample_digest(first_sample)
        beginnings = [Beginning(0, 0, first)] if state is None else []
        remaining = chain((first_sample,), samples)
        position += sum(1 for _ in islice(remaining, start - position))  # consumed before: read again and dropped
        step, number, opening = position // plan.global_batch, 0, True
        while True:
            if seeking and not opening:
                self._seed_from(position)
            # Samples of other ranks are dropped at once: a window of all would need the memory of a global batch.
            window = [sample if i in needed else None for i, sample in enumerate(islice(remaining, plan.global_batch))]
            size = len(window)
            if size == 0 or (size < plan.global_batch and plan.drop_last):
                return
            micro_batches = list(plan.window(position, window, edges, step, opening))
            # Not after the end, where many begin anew from their state.
            state = state_of(dataset) if seeking and size == plan.global_batch else None
            seeks = [] if state is None else [Seek(0, 0, step, [position + size, state])]
            for turn, micro_batch in enumerate(micro_batches, number):
                if turn % workers == worker:
                    batch = self.collate([window[i - position] for i in micro_batch.positions(plan.part)])
                    yield Piece(micro_batch, micro_batch.count, batch, first, seeks, beginnings)
            position, step, number, opening = position + size, step + 1, number + len(micro_batches), False

    def _seed_from(self, position: int) -> None:
        """Seed the generators for the step from ``position`` on: the same whether the epoch was resumed or not."""
        seed, epoch, _ = self._position.tolist()
        seed_generators(derived_seed("stream", seed, epoch, position))


@dataclass(eq=False)
class ShardedStream(_Stream):
    """Reads the shards that are dealt out to this rank. ``start`` is a turn.

    Attributes:
        dealing: how they are dealt out.
    """

    dealing: Dealing

    def _seed(self, seed: int, epoch: int, worker: int) -> int:
        return derived_seed("stream", seed, epoch, self.plan.rank, worker)

    def _surroundings(self) -> AbstractContextManager[None]:
        return environment(RANK=self.plan.rank, WORLD_SIZE=self.plan.world_size)

    def _pieces(self, epoch: int, start: int, worker: int, workers: int) -> Iterator[Turn | None]:
        groups, shares = self.dealing.groups, self.dealing.shares(self.plan.rank, self.plan.world_size)
        # Of a turn that is not before the start, a seek would skip samples.
        seeks = {(seek.part, seek.group): seek for seek in self.seeks if seek.turn < start}
        reader = partial(Reader, self.dataset, self.dealing, seed=int(self._position[0]), epoch=epoch)
        readers = {
            group: [reader(part, group, seek=seeks.get((part, group))) for part, _ in shares]
            for group in range(worker, groups, workers)
        }
        sample, has_more = None, bool(readers)
        turns = self._turns(start, worker, workers)
        while has_more:
            if (turn := next(turns)) is None:
                yield None
                continue
            kept: list[Any] = []
            current = readers[turn % groups]
            for shard, (_, share) in zip(current, shares, strict=True):
                samples = shard.read(turn)
                sample = shard.sample if sample is None or samples else sample
                kept += samples[share]
            if sample is None:  # this group has ended; the first one has samples if any of this rank's has
                sample = next(iter(reader(shares[0][0], 0).read(0)), None)
            has_more = bool(kept) or not all(shard.ended for group in readers.values() for shard in group)
            seeking = [shard.seek for shard in current if shard.seek]
            beginnings = [shard.beginning for shard in current if shard.beginning]
            yield Turn(turn, self._cut(kept, sample), seeking, beginnings)

    def _turns(self, start: int, worker: int, workers: int) -> Iterator[int | None]:
        """Yield the turns of a worker from ``start`` on, or None, so that they arrive in order from all workers.

        A DataLoader takes from its workers in turn. If the groups don't divide evenly, some have nothing at times.
        """
        groups = self.dealing.groups
        cycle = -(-groups // workers) * workers
        begin = start // groups * cycle + start % groups
        for number in count(begin - begin % workers + worker, workers):
            cycles, group = divmod(number, cycle)
            turn = cycles * groups + group
            yield turn if group < groups and turn >= start else None

    def _cut(self, kept: list[Any], sample: Any) -> list[Piece]:
        """Return this rank's micro-batches of a turn, with a stand-in for the first that has no samples."""
        cuts = self.plan.accumulate
        size = self.dealing.kept(self.plan.rank, self.plan.world_size)
        # Cut by the size of a full turn, so that all ranks make the same micro-batches, however many samples they have.
        edges = [-(-i * size // cuts) for i in range(cuts + 1)]
        parts = [kept[begin:end] for begin, end in pairwise(edges)]
        empty = parts.index([]) if [] in parts and sample is not None else None
        return [
            Piece(None, len(part), self.collate(part or [sample]) if part or i == empty else None, 0)
            for i, part in enumerate(parts)
        ]


_NOTHING = object()
