"""What a worker process (or this one, without workers) does for a batch: read its samples and collate them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch.utils.data import Dataset, get_worker_info

from unitrain.data.known_datasets import collated_rows, draws_nothing, is_default_collate
from unitrain.data.seeded_reads import SeededReads
from unitrain.data.structure import without_rows
from unitrain.rng import generators_restored, seed_generators

Collate = Callable[[list[Any]], Any]

# Parts what a collate function draws from what the batch's first sample does.
_COLLATING = 0xC2B2AE3D27D4EB4F


class Request(NamedTuple):
    """The samples that make a batch."""

    samples: list[int]
    seeds: list[int] | None
    """Each sample's; None leaves the generators alone."""
    empty: bool
    """Whether the batch shall have no rows; its one sample is there to learn the structure from."""


class BatchReader(Dataset[Any]):
    """A map-style dataset from which torch's DataLoader gets whole batches."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seeded = SeededReads()
        self._nothing: Any = None

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, request: Request) -> Any:
        if request.empty:
            return self._without_rows(request)
        if is_default_collate(self._collate):
            batch = collated_rows(self._dataset, request.samples)
            if batch is not None:
                return batch
        return self._batch(request, self._collate)

    def _without_rows(self, request: Request) -> Any:
        if self._nothing is None:
            self._nothing = self._batch(request, lambda samples: empty_batch(samples[0], self._collate))
        return self._nothing

    def _batch(self, request: Request, collate: Collate) -> Any:
        """Read samples and collate them, and let both draw from what the request says."""
        seeds, own_collate = request.seeds, not is_default_collate(self._collate)
        still = draws_nothing(self._dataset)
        if seeds is None or (still and not own_collate):
            return collate(self._read(request.samples))
        with _own_generators():
            samples = self._read(request.samples) if still else self._seeded.read(self._dataset, request.samples, seeds)
            if own_collate:
                seed_generators(seeds[0] ^ _COLLATING)
            return collate(samples)

    def _read(self, samples: list[int]) -> list[Any]:
        """Read samples as torch's DataLoader does: in one call, where the dataset takes one."""
        if callable(getattr(self._dataset, "__getitems__", None)):
            return list(self._dataset.__getitems__(samples))
        return [self._dataset[sample] for sample in samples]


def empty_batch(sample: Any, collate: Collate) -> Any:
    """Return a batch of the structure that ``collate`` makes, with no rows; ``collate`` itself sees no empty list."""
    return without_rows(collate([sample]), collate([sample, sample]))


def _own_generators() -> AbstractContextManager[None]:
    """Keep what is drawn for samples from the main process's generators. A worker's serve nothing else."""
    return generators_restored() if get_worker_info() is None else nullcontext()


def as_is(batch: Any) -> Any:
    """Collate what is a batch already."""
    return batch
