"""Batches of a map-style dataset: this rank's samples of each micro-batch, read by torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, tee
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from unitrain.data.order.samplers import Epoch, Orders
from unitrain.data.order.sharding import MicroBatch, Plan
from unitrain.data.reading.fetching import BatchReader, Collate, Request, as_is
from unitrain.data.reading.workers import with_deaths_explained
from unitrain.rng import derived_seed, sample_seeds

# Number of positions that are looked up at once: one by one, an index costs a hundred times as much.
_LOOK_UP = 2**15
_LARGE_BATCH = 2**10


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
        self._orders = orders
        self._seeded = seeded
        self._requests = _Requests()
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(
            BatchReader(dataset, collate),
            batch_sampler=self._requests,  # type: ignore[arg-type]
            collate_fn=as_is,
            generator=self._generator,
            **settings,
        )

    def plan(self, seed: int, number: int) -> Plan:
        """Return the plan of a whole epoch. It may draw from a sampler: see ``Orders.epoch``."""
        return self._orders.epoch(seed, number, 0).plan

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

    def batches(self, seed: int, number: int, start: int, step: int) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this rank's part of each micro-batch of an epoch, from position ``start`` on.

        Raises:
            DataError: a worker died or hangs, or a sampler has no end.
        """
        epoch = self._orders.epoch(seed, number, start)
        labels, micro_batches = tee(epoch.plan)  # the loader reads ahead
        return zip(labels, self._read(epoch, micro_batches, seed, number), strict=True)

    def _read(self, epoch: Epoch, micro_batches: Iterator[MicroBatch], seed: int, number: int) -> Iterator[Any]:
        """Return an iterator over the batches, which the DataLoader requests from its workers ahead."""
        # The DataLoader lives for all epochs, so that persistent workers do, and gets each epoch's requests by this.
        self._requests.coming = requests(epoch, micro_batches, seed if self._seeded else None, number)
        # What workers draw outside of samples differs between ranks.
        self._generator.manual_seed(derived_seed("workers", seed, number, epoch.plan.rank) >> 1)
        return with_deaths_explained(self._loader)


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
    # A division looks samples up for each window anyway. A batch sampler's batches may have any size.
    most = 1 if plan.division is not None else max(1, _LOOK_UP // (plan.global_batch or _LARGE_BATCH))
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
