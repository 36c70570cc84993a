"""Iterable datasets: which rank reads which part, and how the ranks agree on the batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from unitrain import call_site
from unitrain.communication.communicator import Communicator
from unitrain.data.order.sharding import EpochPlan, MicroBatch
from unitrain.data.reading.agreement import Agreement
from unitrain.data.reading.fetching import Collate, as_is
from unitrain.data.reading.stream import Piece, ShardedStream, WholeStream
from unitrain.data.reading.workers import with_deaths_explained
from unitrain.errors import ConfigError, DataError
from unitrain.rng import derived_seed

# Hugging Face's streams are split by the library, WebDataset's by their splitters.
_LIBRARIES = ("datasets", "webdataset")


class Iterable:
    """An iterable dataset, as one rank reads it.

    ``plan`` has the sizes of the steps; its number of samples is not used. ``settings`` are keyword arguments of the
    DataLoader. A ``sharded`` dataset yields a different part on each rank and worker.
    """

    def __init__(
        self,
        communicator: Communicator,
        dataset: Any,
        plan: EpochPlan,
        collate: Collate,
        *,
        sharded: bool,
        settings: dict[str, Any],
    ) -> None:
        self._communicator = communicator
        self._dataset = dataset
        self._plan = plan
        self._collate = collate
        self._settings = settings
        shares = plan.world_size * plan.accumulate
        if sharded and plan.global_batch % shares:
            raise ConfigError(
                f"global_batch_size {plan.global_batch} can't be split evenly over {plan.world_size} ranks with "
                f"accumulate={plan.accumulate}, as a sharded iterable dataset needs: make it a multiple of {shares}."
            )
        has_hook = _library(dataset) not in _LIBRARIES and callable(getattr(dataset, "shard", None))
        self._agreement = Agreement(communicator, plan) if sharded else None
        self._generator = torch.Generator()
        self._read(
            ShardedStream(_split(dataset, plan), plan, collate, has_hook=has_hook)
            if sharded
            else WholeStream(dataset, plan, collate)
        )

    def _read(self, stream: ShardedStream | WholeStream) -> None:
        self._stream = stream
        self._loader: DataLoader[Piece] = DataLoader(
            stream, batch_size=None, collate_fn=as_is, generator=self._generator, **self._settings
        )

    def drawn(self, seed: int, number: int) -> str:
        """Return an empty string: a stream has no sampler."""
        return ""

    def split_by(self, shares: tuple[int, ...], accumulate: int) -> None:
        """Split what is read as a whole by other shares from now on, into another number of micro-batches."""
        self._plan = replace(self._plan, shares=shares, accumulate=accumulate)
        self._read(WholeStream(self._dataset, self._plan, self._collate))

    def plan(self, seed: int, number: int) -> EpochPlan:
        """Return the plan of an epoch.

        Raises:
            TypeError: the length of the dataset is unknown.
        """
        if self._agreement is not None or not hasattr(self._dataset, "__len__"):
            raise TypeError(
                f"a loader of a {type(self._dataset).__name__} has no len(): the number of its batches is unknown "
                "until the dataset ends."
            )
        return replace(self._plan, samples=len(self._dataset))

    def readers(self) -> list[int] | None:
        """Return what a position in a sharded dataset depends on: world size, workers per rank, batch size."""
        if self._agreement is None:
            return None
        plan = self._plan
        batch_size = plan.global_batch // plan.accumulate // plan.world_size
        return [plan.world_size, max(1, self._loader.num_workers), batch_size]

    def batches(self, seed: int, number: int, start: int, step: int) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this rank's part of each micro-batch of an epoch, from step ``step`` and sample ``start`` on.

        Samples that were consumed are read again and skipped, since a stream can only be read from its beginning.
        """
        self._generator.manual_seed(derived_seed("workers", seed, number, self._plan.rank) >> 1)
        self._stream.begin(seed, number, start)
        pieces = self._compared(with_deaths_explained(self._loader))
        if self._agreement is None:
            return ((piece.micro_batch, piece.batch) for piece in pieces if piece.micro_batch is not None)
        return self._agreement.micro_batches(pieces, start, step)

    def _compared(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Compare the first samples of the ranks: they must be equal exactly if each rank reads the whole dataset."""
        first = next(pieces, None)
        if self._plan.world_size > 1:
            digests = self._communicator.all_gather(torch.tensor(0 if first is None else first.first)).tolist()
            self._check_first(digests)
        if first is not None:
            yield first
            yield from pieces

    def _check_first(self, digests: list[int]) -> None:
        name = type(self._dataset).__name__
        if self._agreement is None and len(set(digests)) > 1:
            raise DataError(
                f"the ranks read different samples from this {name}, which must be the same on all unless it is "
                "sharded: pass sharded=True if the dataset yields a different part on each rank and worker. Otherwise "
                "draw its random numbers from python's, numpy's or torch's global generators."
            )
        if self._agreement is not None and len(set(digests)) == 1 and digests[0] and self._communicator.is_main:
            call_site.warn(
                f"this {name} begins with the same sample on every rank: if it is not sharded, every rank trains on "
                "all of it. Pass sharded=False then."
            )


def is_sharded(dataset: Any) -> bool:
    """Return whether a dataset is of a library that shards its datasets, or has a method ``shard``."""
    return _library(dataset) in _LIBRARIES or callable(getattr(dataset, "shard", None))


def _library(dataset: Any) -> str:
    return type(dataset).__module__.partition(".")[0]


def _split(dataset: Any, plan: EpochPlan) -> Any:
    """Return this rank's part of a Hugging Face stream, which splits it over workers itself; else the dataset."""
    if _library(dataset) != "datasets":
        return dataset
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(dataset, plan.rank, plan.world_size)
