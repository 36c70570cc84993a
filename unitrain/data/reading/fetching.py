"""Reads the samples of a batch and collates them, in a worker process or in the main process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch.utils.data import Dataset, get_worker_info

from unitrain.data.reading.fingerprint import sample_digest
from unitrain.data.reading.known_datasets import collated_rows, draws_nothing, is_default_collate
from unitrain.data.reading.seeded_reads import SeededReads
from unitrain.rng import generators_restored, seed_generators

Collate = Callable[[list[Any]], Any]

# Separates the random numbers of a collate function from the numbers of the batch's first sample.
_COLLATING = 0xC2B2AE3D27D4EB4F


class Request(NamedTuple):
    """The samples that make a batch."""

    samples: list[int]
    seeds: list[int] | None
    """A seed for each sample; None leaves the generators alone."""
    compared: bool = False
    """Whether digests of the samples are wanted, and no batch."""


class BatchReader(Dataset[Any]):
    """A map-style dataset that returns whole batches to torch's DataLoader, which calls ``__getitems__`` in a worker.

    A worker thus sends collated batches, and a batch needs no more than a list of numbers as a request.

    Args:
        dataset: the script's map-style dataset.
        collate: makes a batch of a list of samples.
    """

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seeded = SeededReads()

    def __getitems__(self, request: Request) -> Any:
        if request.compared:
            return self._digests(request)
        # torch's own collate function stacks rows, so that reading them at once has the same result.
        if is_default_collate(self._collate):
            batch = collated_rows(self._dataset, request.samples)
            if batch is not None:  # nothing draws random numbers here, so seeds are not needed
                return batch
        return self._batch(request)

    def _batch(self, request: Request) -> Any:
        """Read samples and collate them, with random numbers from the request's seeds."""
        collate, seeds, may_draw = self._collate, request.seeds, not is_default_collate(self._collate)
        still = draws_nothing(self._dataset)
        if seeds is None or (still and not may_draw):
            return collate(self._read(request.samples))
        # A worker's generators serve nothing else.
        with generators_restored() if get_worker_info() is None else nullcontext():
            samples = self._read(request.samples) if still else self._seeded.read(self._dataset, request.samples, seeds)
            if may_draw:
                seed_generators(seeds[0] ^ _COLLATING)
            return collate(samples)

    def _digests(self, request: Request) -> list[tuple[int, int]]:
        """Return each sample's index and digest; nothing if they can't be read, or are others when read again.

        So they are if the dataset draws from a generator that nobody seeds.
        """
        assert request.seeds is not None

        def read() -> list[tuple[int, int]]:
            samples = SeededReads().read(self._dataset, request.samples, request.seeds or [])
            return [(index, sample_digest(sample)) for index, sample in zip(request.samples, samples, strict=True)]

        with generators_restored():
            try:
                digests = read()
                return digests if draws_nothing(self._dataset) or read() == digests else []
            except Exception:  # the script's: it is raised where the sample is read for a batch
                return []

    def _read(self, samples: list[int]) -> list[Any]:
        """Read samples as torch's DataLoader does: in one call, if the dataset has ``__getitems__``."""
        if callable(getattr(self._dataset, "__getitems__", None)):
            return list(self._dataset.__getitems__(samples))
        return [self._dataset[sample] for sample in samples]


def as_is(batch: Any) -> Any:
    """Return a batch that is collated already. It is the DataLoader's ``collate_fn``: a lambda can't be pickled."""
    return batch
