"""Reads this rank's batches of an iterable dataset, in a worker process or in the main process.

A stream is read in one of two ways:

- ``WholeStream``: every rank reads all samples and keeps its part, as with a map-style dataset. The global batches are
  the same with any number of ranks, and every rank finds the end by itself.
- ``ShardedStream``: every rank and worker reads a different shard. Shards differ in length, so that the ranks must
  agree on the end; see ``agreement.py``.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from unitrain.data.order.sharding import EpochPlan, MicroBatch, cut
from unitrain.data.reading.fetching import Collate
from unitrain.data.reading.fingerprint import sample_digest
from unitrain.rng import SeparateGenerators, derived_seed, seed_generators


class Piece(NamedTuple):
    """A batch as yielded by a reader."""

    micro_batch: MicroBatch | None
    """The micro-batch that the batch belongs to; None if the reader does not know it."""
    samples: int
    """Number of samples in the batch; 0 for a stand-in."""
    batch: Any
    first: int
    """A digest of the stream's first sample."""


class _Stream(IterableDataset[Piece]):
    """Base class of the two ways."""

    def __init__(self, dataset: Any, plan: EpochPlan, collate: Collate) -> None:
        self._dataset = dataset
        self._plan = plan
        self._collate = collate
        # Persistent workers have a copy of this object, so what changes between epochs is in shared memory.
        self._position = torch.zeros(3, dtype=torch.int64)
        self._position.share_memory_()  # type: ignore[no-untyped-call]

    def begin(self, seed: int, epoch: int, start: int) -> None:
        """Set the position of the next iteration: an epoch, from its sample ``start`` on."""
        self._position[:] = torch.tensor([seed, epoch, start])

    def __iter__(self) -> Iterator[Piece]:
        seed, epoch, start = self._position.tolist()
        if callable(getattr(self._dataset, "set_epoch", None)):
            self._dataset.set_epoch(epoch)
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        generators = _separate_generators(self._seed(seed, epoch, worker))
        pieces = self._pieces(epoch, start, worker, workers)
        while True:
            with generators(), self._surroundings():
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    @abstractmethod
    def _seed(self, seed: int, epoch: int, worker: int) -> int:
        """Return the seed of the generators that the dataset draws from."""

    @abstractmethod
    def _surroundings(self) -> AbstractContextManager[None]:
        """Return a context manager in which the dataset is read."""

    @abstractmethod
    def _pieces(self, epoch: int, start: int, worker: int, workers: int) -> Iterator[Piece]:
        """Yield the pieces of an epoch from sample ``start`` on, as one of ``workers`` workers."""


class WholeStream(_Stream):
    """Reads all samples and keeps this rank's part. With W workers, each yields every W-th micro-batch."""

    def _seed(self, seed: int, epoch: int, worker: int) -> int:
        return derived_seed("stream", seed, epoch)  # every rank and worker must read the same samples

    def _surroundings(self) -> AbstractContextManager[None]:
        return _alone()

    def _pieces(self, epoch: int, start: int, worker: int, workers: int) -> Iterator[Piece]:
        plan, edges = self._plan, self._plan.edges()
        period, own = plan.part.period, frozenset(plan.part.offsets)
        samples = iter(self._dataset)
        first_sample = next(samples, _NOTHING)
        if first_sample is _NOTHING:
            return
        first, stand_in = sample_digest(first_sample), first_sample
        remaining = chain((first_sample,), samples)
        position = sum(1 for _ in islice(remaining, start))
        step, number, opening = position // plan.global_batch, 0, True
        while True:
            kept: list[list[Any]] = []
            size = 0
            for part, (begin, end) in enumerate(pairwise(edges)):
                mine = (number + part) % workers == worker
                kept.append([])
                for offset, sample in enumerate(islice(remaining, end - begin)):
                    size += 1
                    if mine and offset == 0:
                        stand_in = sample  # if this rank gets none of the micro-batch
                    if mine and offset % period in own:
                        kept[part].append(sample)
                if mine and not kept[part]:
                    kept[part].append(stand_in)
            if size == 0 or (size < plan.global_batch and plan.drop_last):
                return
            micro_batches = cut(position, size, edges, step, opening, plan.part)
            for part, micro_batch in enumerate(micro_batches):
                if (number + part) % workers == worker:
                    yield Piece(micro_batch, micro_batch.count, self._collate(kept[part]), first)
            position, step, number, opening = position + size, step + 1, number + plan.accumulate, False


class ShardedStream(_Stream):
    """Reads the shard of this rank and worker. ``start`` is ignored."""

    def __init__(self, dataset: Any, plan: EpochPlan, collate: Collate, *, has_hook: bool) -> None:
        super().__init__(dataset, plan, collate)
        self._has_hook = has_hook
        self._batch_size = plan.global_batch // plan.accumulate // plan.world_size

    def _seed(self, seed: int, epoch: int, worker: int) -> int:
        return derived_seed("stream", seed, epoch, self._plan.rank, worker)

    def _surroundings(self) -> AbstractContextManager[None]:
        return _environment(RANK=self._plan.rank, WORLD_SIZE=self._plan.world_size)

    def _pieces(self, epoch: int, start: int, worker: int, workers: int) -> Iterator[Piece]:
        dataset = self._dataset
        if self._has_hook:
            parts = self._plan.world_size * workers
            dataset = dataset.shard(num_shards=parts, index=self._plan.rank * workers + worker)
        samples = iter(dataset)
        first, sample = 0, None
        while batch := list(islice(samples, self._batch_size)):
            sample = batch[-1]
            first = first or sample_digest(batch[0])
            if len(batch) == self._batch_size or not self._plan.drop_last:
                yield Piece(None, len(batch), self._collate(batch), first)
        if first:
            # Other ranks may have more samples; this one then takes part with its last sample as a stand-in.
            yield Piece(None, 0, self._collate([sample]), first)


_NOTHING = object()


def _separate_generators(seed: int) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that makes a context manager in which separately seeded generators are used."""
    if get_worker_info() is not None:  # a worker's generators serve nothing else
        seed_generators(seed)
        return nullcontext
    return SeparateGenerators(seed).in_use


@contextmanager
def _alone() -> Iterator[None]:
    """Hide from a dataset that it is read by a worker, over which it might shard itself."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = info


@contextmanager
def _environment(**variables: int) -> Iterator[None]:
    """Set the environment variables by which datasets shard themselves; not every launcher sets them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
