"""Batches of an iterable dataset: who reads which part of it, and how the ranks stay together."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from unitrain.communicator import Communicator
from unitrain.data.agreement import Agreement
from unitrain.data.fetching import Collate, as_is
from unitrain.data.sharding import EpochPlan, MicroBatch
from unitrain.data.stream import Piece, ShardedStream, WholeStream
from unitrain.data.workers import with_deaths_explained
from unitrain.errors import ConfigError, DataError
from unitrain.rng import derived_seed

# Hugging Face's streams are split by their library, WebDataset's by the splitters that they are given.
_LIBRARIES = ("datasets", "webdataset")


class Iterable:
    """An iterable dataset, as one rank reads it.

    Args:
        communicator: of this process; the ranks share the dataset.
        dataset: with ``__iter__``.
        plan: the steps' sizes; its number of samples is not used.
        collate: makes a batch of samples.
        sharded: whether the dataset yields a part of its own on each rank and worker.
        settings: the DataLoader's.
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
        shares = plan.world_size * plan.accumulate
        if sharded and plan.global_batch % shares:
            raise ConfigError(
                f"global_batch_size {plan.global_batch} can't be cut into equal batches for {plan.world_size} ranks "
                f"with accumulate={plan.accumulate}, and each rank of a sharded stream reads its own: make it a "
                f"multiple of {shares}."
            )
        has_hook = _library(dataset) not in _LIBRARIES and callable(getattr(dataset, "shard", None))
        self._stream: ShardedStream | WholeStream
        if sharded:
            self._stream = ShardedStream(_split(dataset, plan), plan, collate, has_hook=has_hook)
        else:
            self._stream = WholeStream(dataset, plan, collate)
        self._agreement = Agreement(communicator, plan) if sharded else None
        self._generator = torch.Generator()
        self._loader: DataLoader[Piece] = DataLoader(
            self._stream, batch_size=None, collate_fn=as_is, generator=self._generator, **settings
        )

    def plan(self, seed: int, number: int) -> EpochPlan:
        """Return the plan of an epoch.

        Raises:
            TypeError: nobody knows how long the stream is.
        """
        if self._agreement is not None or not hasattr(self._dataset, "__len__"):
            raise TypeError(
                f"a loader of a {type(self._dataset).__name__} has no len(): it ends when the stream does, "
                "which shows only then."
            )
        return replace(self._plan, samples=len(self._dataset))

    def readers(self) -> list[int] | None:
        """Return what a position in a sharded stream depends on: ranks, workers of each, samples of their batches."""
        if self._agreement is None:
            return None
        plan = self._plan
        batch_size = plan.global_batch // plan.accumulate // plan.world_size
        return [plan.world_size, max(1, self._loader.num_workers), batch_size]

    def batches(self, seed: int, number: int, start: int, step: int) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this rank's part of each micro-batch of an epoch, from step ``step`` on, its sample ``start``.

        What was consumed is read once more and dropped: only the stream itself knows how to begin anywhere else.
        """
        self._generator.manual_seed(derived_seed("workers", seed, number, self._plan.rank) >> 1)
        self._stream.begin(seed, number, start)
        pieces = self._compared(with_deaths_explained(self._loader))
        if self._agreement is None:
            return ((piece.micro_batch, piece.batch) for piece in pieces if piece.micro_batch is not None)
        return self._agreement.micro_batches(pieces, start, step)

    def _compared(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Compare the ranks' first samples: the same where all read the whole stream, and only there."""
        first = next(pieces, None)
        if self._plan.world_size > 1:
            digests = self._communicator.all_gather(torch.tensor(0 if first is None else first.first)).tolist()
            self._judge(digests)
        if first is not None:
            yield first
            yield from pieces

    def _judge(self, digests: list[int]) -> None:
        name = type(self._dataset).__name__
        if self._agreement is None and len(set(digests)) > 1:
            raise DataError(
                f"the ranks read different samples from this {name}, of which each was to keep its share of the whole: "
                "pass sharded=True where the dataset yields a part of its own on each rank and worker; else let it "
                "yield the same on all, with random numbers from python's, numpy's or torch's generators."
            )
        if self._agreement is not None and len(set(digests)) == 1 and digests[0] and self._communicator.is_main:
            warnings.warn(
                f"this {name} begins with the same sample on every rank: it may not be sharded at all, and is then "
                "read once by each.",
                UserWarning,
                stacklevel=2,
            )


def is_sharded(dataset: Any) -> bool:
    """Whether a dataset is known to yield a part of its own on each rank and worker, or has the hook for it."""
    return _library(dataset) in _LIBRARIES or callable(getattr(dataset, "shard", None))


def _library(dataset: Any) -> str:
    return type(dataset).__module__.partition(".")[0]


def _split(dataset: Any, plan: EpochPlan) -> Any:
    """Return this rank's part of Hugging Face's streams, which split the rest among workers; else the dataset."""
    if _library(dataset) != "datasets":
        return dataset
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(dataset, plan.rank, plan.world_size)
