"""Worker processes of a loader: how many by default, how long they may take, and what their deaths mean."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from unitrain.config import StrategyConfig
from unitrain.errors import DataError
from unitrain.process import end_with_parent

T = TypeVar("T")

_NOTICED_S = 2.0


def with_defaults(
    settings: dict[str, Any],
    dataset: Any,
    device: torch.device,
    config: StrategyConfig,
    *,
    local_world_size: int,
    most_workers: int,
) -> dict[str, Any]:
    """Return a DataLoader's settings with this run's defaults for workers and pinning filled in."""
    filled = {name: value for name, value in settings.items() if value is not None}
    filled.setdefault("num_workers", default_workers(dataset, device, local_world_size, most_workers))
    if filled["num_workers"] > 0:
        # Less than a collective's: the rank whose worker hangs shall say so before the others give up on it.
        filled.setdefault("timeout", config.timeout_s / 2)
        filled["worker_init_fn"] = _Worker(filled.get("worker_init_fn"))
    pinned = config.pin_memory
    if pinned is None:
        # What this process reads itself may be on the GPU already, which can't be pinned; and to pin it would take this
        # thread as long as the copy that it is to spare.
        pinned = device.type == "cuda" and filled["num_workers"] > 0
    filled.setdefault("pin_memory", pinned)
    return filled


class _Worker:
    """What a worker does first: it ties its life to its process's, then calls the user's ``worker_init_fn``.

    torch's workers look for their parent only between batches: one that hangs within a sample would stay for ever. And
    they die of a signal that is meant for the whole job, which the process that they serve may want to end in good
    order: only that process ends them.
    """

    def __init__(self, user_function: Callable[[int], None] | None) -> None:
        self._user_function = user_function

    def __call__(self, worker: int) -> None:
        end_with_parent()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, _let_pass)
        if self._user_function is not None:
            self._user_function(worker)


def _let_pass(number: int, frame: object) -> None:
    """Do nothing; unlike SIG_IGN, this is not inherited by programs that a worker starts."""


def _can_be_ended(batches: Iterator[Any]) -> None:
    """Let a worker that torch terminates, because it has not ended by itself, be killed: it lets SIGTERM pass."""
    for worker in getattr(batches, "_workers", ()):
        worker._popen.terminate = worker._popen.kill


def default_workers(dataset: Any, device: torch.device, local_world_size: int, most: int) -> int:
    """Return the number of workers of a loader that was given none.

    On a GPU: this process's share of the host's cores but one, at most ``most``. On a CPU, whose cores compute, and
    for samples that are in memory: none.
    """
    if device.type == "cpu" or _in_memory(dataset):
        return 0
    cores = min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // local_world_size)
    return max(0, min(cores - 1, most))


def _in_memory(dataset: Any) -> bool:
    if isinstance(dataset, Subset):
        return _in_memory(dataset.dataset)
    return isinstance(dataset, (TensorDataset, list, tuple))


def with_deaths_explained(loader: DataLoader[T]) -> Iterator[T]:
    """Yield from a DataLoader; what it says of lost workers is raised as DataError, with advice.

    An error inside a worker is raised as it is, with the worker's own traceback.
    """
    batches = iter(loader)
    _can_be_ended(batches)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (RuntimeError, ConnectionError, EOFError) as error:
            explained = _explained(error if isinstance(error, RuntimeError) else _noticed(error, loader), loader)
            if explained is None:
                raise
            raise explained from error
        yield batch


def _noticed(error: Exception, loader: DataLoader[Any]) -> Exception:
    """Return what torch has to say of a broken connection: a worker that died as it sent a batch is noticed later."""
    if not loader.num_workers or str(error).startswith("Caught "):
        return error
    try:
        time.sleep(_NOTICED_S)  # until the signal of its death comes, whose handler raises
    except RuntimeError as death:
        return death
    return error


def _explained(error: Exception, loader: DataLoader[Any]) -> DataError | None:
    """Return what an error that comes out of a DataLoader means, where it is about workers."""
    message = str(error)
    if message.startswith("DataLoader timed out"):
        return DataError(
            f"no batch came from the loader's workers for {loader.timeout:g} s: a worker hangs, or one batch takes "
            "longer. Raise timeout= where that is normal; else look at what the dataset waits for."
        )
    if not loader.num_workers or message.startswith("Caught "):  # the dataset's own
        return None
    if isinstance(error, RuntimeError) and not message.startswith("DataLoader worker (pid"):
        return None
    told = error.__cause__ if isinstance(error.__cause__, RuntimeError) else error
    reason = str(told) if isinstance(told, RuntimeError) else f"a DataLoader worker died: {message}"
    return DataError(
        f"{reason.rstrip('. ')}. One that was killed has mostly run out of memory, the host's or /dev/shm: take fewer "
        "workers, smaller batches or a larger /dev/shm."
    )
