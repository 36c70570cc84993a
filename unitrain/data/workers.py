"""Worker processes of a loader: how many by default, how long they may take, and what their deaths mean."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import Subset, TensorDataset

from unitrain.errors import DataError

if TYPE_CHECKING:
    from unitrain.strategy import Strategy

T = TypeVar("T")


def with_defaults(settings: dict[str, Any], dataset: Any, strategy: Strategy, *, most_workers: int) -> dict[str, Any]:
    """Return a DataLoader's settings with this run's defaults for workers and pinning filled in."""
    filled = {name: value for name, value in settings.items() if value is not None}
    filled.setdefault("num_workers", default_workers(dataset, strategy, most_workers))
    if filled["num_workers"] > 0:
        # Less than a collective's: the rank whose worker hangs shall say so before the others give up on it.
        filled.setdefault("timeout", strategy.config.timeout_s / 2)
    pinned = strategy.config.pin_memory
    filled.setdefault("pin_memory", strategy.device.type == "cuda" if pinned is None else pinned)
    return filled


def default_workers(dataset: Any, strategy: Strategy, most: int) -> int:
    """Return the number of workers of a loader that was given none.

    On a GPU: this process's share of the host's cores but one, at most ``most``. On a CPU, whose cores compute, and
    for samples that are in memory: none.
    """
    if strategy.device.type == "cpu" or _in_memory(dataset):
        return 0
    cores = min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // strategy.local_world_size)
    return max(0, min(cores - 1, most))


def _in_memory(dataset: Any) -> bool:
    if isinstance(dataset, Subset):
        return _in_memory(dataset.dataset)
    return isinstance(dataset, (TensorDataset, list, tuple))


def with_deaths_explained(batches: Iterator[T], timeout_s: float) -> Iterator[T]:
    """Yield from a DataLoader's iterator; what torch says of lost workers is raised as DataError, with advice.

    An error inside a worker is raised as it is, with the worker's own traceback.
    """
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            message = str(error)
            if message.startswith("DataLoader timed out"):
                raise DataError(
                    f"no batch came from the loader's workers for {timeout_s:g} s: a worker hangs, or one batch takes "
                    "longer. Raise timeout= where that is normal; else look at what the dataset waits for."
                ) from error
            if message.startswith("DataLoader worker (pid"):
                told = str(error.__cause__) if isinstance(error.__cause__, RuntimeError) else message
                raise DataError(
                    f"{told.rstrip('. ')}. One that was killed has mostly run out of memory, the host's or /dev/shm: "
                    "take fewer workers, smaller batches or a larger /dev/shm."
                ) from error
            raise
        yield batch
