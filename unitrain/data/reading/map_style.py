"""Batches of a map-style dataset: this rank's samples of each micro-batch, read by torch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice, takewhile, tee
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from unitrain.data.order.samplers import Epoch, Orders
from unitrain.data.order.sharding import MicroBatch, Plan
from unitrain.data.reading.fetching import BatchReader, Collate, Request, as_is
from unitrain.data.reading.workers import with_deaths_explained
from unitrain.rng import derived_seed, sample_seeds

# Number of positions that are looked up at once: one by one, an index costs a hundred times as much. The arrays that
# this takes stay in a core's cache.
_LOOK_UP = 2**15
# Number of samples that the ranks compare, and that each of them reads for it.
COMPARED = 5


class MapStyle:
    """A map-style dataset, as one rank reads it. Reading needs no communication: every rank knows the plan of all.

    Args:
        dataset: the dataset, which is pickled for workers.
        orders: makes the epochs.
        collate: makes a batch of a list of samples.
        seeded: whether generators are seeded for each sample.
        settings: keyword arguments of the DataLoader.
    """

    def __init__(
        self, dataset: Any, orders: Orders, collate: Collate, *, seeded: bool, settings: dict[str, Any]
    ) -> None:
        self._dataset = dataset
        self._orders = orders
        self._seeded = seeded
        self._requests = _Requests()
        self._generator = torch.Generator()
        self._make_loader: Callable[[], DataLoader[Any]] = partial(
            DataLoader,
            BatchReader(dataset, collate),
            batch_sampler=self._requests,  # type: ignore[arg-type]
            collate_fn=as_is,
            generator=self._generator,
            **settings,
        )
        self._loader = self._make_loader()
        self._length = len(dataset)
        self._reading: Iterable[MicroBatch] = ()

    def plan(self, seed: int, number: int) -> Plan:
        """Return the plan of a whole epoch. It may draw from a sampler: see ``Orders.epoch``."""
        return self._orders.epoch(seed, number, 0).plan

    def read(self, stop: int) -> Iterator[MicroBatch]:
        """Return this rank's micro-batches up to position ``stop`` in the epoch that was read last."""
        return takewhile(lambda micro_batch: micro_batch.stop <= stop, self._reading)

    def drawn(self, seed: int, number: int) -> str:
        """Return a digest of an epoch's indices, if they come from a sampler and were drawn last; else ""."""
        return self._orders.drawn(seed, number)

    def forget(self) -> None:
        """Draw the indices of the next epoch anew, if they come from a sampler."""
        self._orders.forget()

    def readers(self, number: int) -> None:
        """Return None: a position does not depend on the number of ranks and workers."""

    def seeks(self, number: int, step: int) -> dict[str, Any]:
        """Return nothing for a loader's state, since its position alone says where to continue."""
        return {}

    def batches(
        self, seed: int, number: int, start: int, step: int, compare: Callable[[Any], None] | None = None
    ) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this rank's part of each micro-batch of an epoch, from position ``start`` on.

        Args:
            seed: of the run.
            number: of the epoch.
            start: number of positions that were consumed before.
            step: number of steps before.
            compare: called first, with indices and digests of some samples; see ``BatchReader``. The samples are read
                where batches are: files that a process opens before it forks its workers would be shared with them.

        Raises:
            DataError: a worker died or hangs, or a sampler has no end.
        """
        epoch = self._orders.epoch(seed, number, start)
        self._reading = epoch.plan
        labels, micro_batches = tee(epoch.plan)  # the loader reads ahead
        coming = requests(epoch, micro_batches, seed if self._seeded else None, number)
        if compare is not None:
            coming = chain([_comparison(epoch, seed, number)], coming)
        batches = self._read(coming, derived_seed("workers", seed, number, epoch.plan.rank))
        if compare is not None:
            compare(next(batches))
        return zip(labels, batches, strict=True)

    def _read(self, coming: Iterator[Request], seed: int) -> Iterator[Any]:
        """Return an iterator over what is requested, which the DataLoader requests from its workers ahead."""
        if self._loader.persistent_workers and (len(self._dataset) != self._length or _has_epochs(self._dataset)):
            self._loader = self._make_loader()  # workers with a copy of the dataset from before end with their loader
        self._length = len(self._dataset)
        # The DataLoader lives for all epochs, so that persistent workers do, and gets each epoch's requests by this.
        self._requests.coming = coming
        # What workers draw outside of samples differs between ranks.
        self._generator.manual_seed(seed >> 1)
        return with_deaths_explained(self._loader)


def _has_epochs(dataset: Any) -> bool:
    """Return whether a dataset, or one that it wraps, has a method ``set_epoch``, which scripts call in every epoch."""
    while dataset is not None:
        if callable(getattr(dataset, "set_epoch", None)):
            return True
        dataset = getattr(dataset, "dataset", None)
    return False


def _comparison(epoch: Epoch, seed: int, number: int) -> Request:
    """Return a request for digests of samples at even distances in the rest of an epoch."""
    start, end = epoch.plan.start, epoch.plan.end
    positions = np.unique(np.linspace(start, max(start, end - 1), COMPARED, dtype=np.int64)[: end - start])
    samples = epoch.order.take(positions)
    return Request(samples.tolist(), sample_seeds(seed, number, samples), compared=True)


class _Requests:
    """The batch sampler of the DataLoader: yields the requests that were set for the coming epoch."""

    coming: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.coming


def requests(epoch: Epoch, micro_batches: Iterable[MicroBatch], seed: int | None, number: int) -> Iterator[Request]:
    """Yield a request for each micro-batch.

    Args:
        epoch: the plan and the order.
        micro_batches: of this rank, from the plan.
        seed: of the run; None if samples are not seeded.
        number: of the epoch.
    """
    plan = epoch.plan
    # A division looks samples up for each window anyway, and those of a batch sampler need no arithmetic.
    most = 1 if plan.division is not None or plan.global_batch is None else max(1, _LOOK_UP // plan.global_batch)
    coming = iter(micro_batches)
    while gathered := list(islice(coming, most)):
        positions = np.concatenate([micro_batch.positions(plan.part) for micro_batch in gathered])
        samples = epoch.order.take(positions)
        indices = samples.tolist()
        seeds = None
        if seed is not None:
            # By its position if a sample may repeat, so that each repetition is augmented anew.
            seeds = sample_seeds(seed, number, samples, positions if epoch.repeats else None)
        begin = 0
        for micro_batch in gathered:
            part = slice(begin, begin := begin + max(1, micro_batch.count))  # a stand-in has one sample
            yield Request(indices[part], seeds and seeds[part])
