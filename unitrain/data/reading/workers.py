"""DataLoader workers: their default number and timeout, how they end, and messages for their failures."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from unitrain.config import StrategyConfig
from unitrain.device import IN_STEP
from unitrain.errors import DataError
from unitrain.process import end_with_parent, usable_cores

T = TypeVar("T")

_SIGNAL_WAIT_S = 2.0


def with_defaults(
    settings: dict[str, Any],
    dataset: Any,
    device: torch.device,
    config: StrategyConfig,
    *,
    local_world_size: int,
    most_workers: int,
) -> dict[str, Any]:
    """Return settings of a DataLoader, with defaults for workers, their timeout and pinned memory filled in.

    Args:
        settings: keyword arguments that the script has passed; None counts as not passed.
        dataset: the dataset.
        device: the device of this rank.
        config: has ``timeout_s`` and ``pin_memory``.
        local_world_size: number of processes on this host.
        most_workers: number of workers at most by default; 1 if each would read everything.
    """
    filled = {name: value for name, value in settings.items() if value is not None}
    filled.setdefault("num_workers", default_workers(dataset, device, local_world_size, most_workers))
    if filled["num_workers"] > 0:
        # Less than the timeout of collectives: a rank with a hanging worker reports it before the others time out.
        filled.setdefault("timeout", config.timeout_s / 2)
        filled["worker_init_fn"] = partial(_prepare_worker, filled.get("worker_init_fn"))
    pinned = config.pin_memory
    if pinned is None:
        # Without workers, tensors may already be on the GPU, where they can't be pinned. And pinning would take this
        # thread as long as the copy that it is meant to speed up.
        pinned = device.type not in IN_STEP and filled["num_workers"] > 0
    filled.setdefault("pin_memory", pinned)
    return filled


def _prepare_worker(user_function: Callable[[int], None] | None, worker: int) -> None:
    """Make this worker process end with its parent, then call the user's ``worker_init_fn``.

    torch calls this in the worker, before the first sample is read. torch's workers check for their parent only between
    batches, so one that hangs in a sample would run forever. And they would die of a signal that is sent to the whole
    job, on which the parent may save a checkpoint first: so workers ignore such signals, and only the parent ends them.
    """
    end_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _ignore)
    if user_function is not None:
        user_function(worker)


def _ignore(number: int, frame: object) -> None:
    """Do nothing. Unlike SIG_IGN, this is not inherited by programs that a worker starts."""


def _kill_on_terminate(batches: Iterator[Any]) -> None:
    """Make torch kill workers that don't end by themselves, instead of terminating them: they ignore SIGTERM."""
    for worker in getattr(batches, "_workers", ()):
        worker._popen.terminate = worker._popen.kill


def default_workers(dataset: Any, device: torch.device, local_world_size: int, most: int) -> int:
    """Return the default number of workers.

    On a GPU, it is this process's share of the host's cores minus one, at most ``most``. On a CPU, whose cores are
    needed for training, and for data in memory, it is 0.
    """
    if device.type == "cpu" or _in_memory(dataset):  # sending a batch between processes takes longer than reading it
        return 0
    # A process that was pinned to cores has these alone; otherwise all processes of the host see all of its cores.
    cores = min(usable_cores(), (os.cpu_count() or 1) // local_world_size)
    return max(0, min(cores - 1, most))


def _in_memory(dataset: Any) -> bool:
    """Return whether a dataset's samples are in memory already, so that workers gain nothing."""
    if isinstance(dataset, Subset):
        return _in_memory(dataset.dataset)
    return isinstance(dataset, (TensorDataset, list, tuple))


def with_deaths_explained(loader: DataLoader[T]) -> Iterator[T]:
    """Yield from a DataLoader, and raise a DataError with a remedy if workers die or time out.

    Exceptions of the dataset in a worker are raised unchanged, with the worker's traceback.

    Args:
        loader: the DataLoader, which starts its workers now unless they are persistent.

    Raises:
        DataError: a worker died, or returned no batch within the timeout.
    """
    batches = iter(loader)
    _kill_on_terminate(batches)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (RuntimeError, ConnectionError, EOFError) as error:
            reason = _death(error, loader)
            if reason is None:
                raise
            raise DataError(reason) from error
        yield batch


def _death(error: Exception, loader: DataLoader[Any]) -> str | None:
    """Return a message for an error of a DataLoader about its workers; None for an exception of the dataset."""
    message = str(error)
    if message.startswith("DataLoader timed out"):
        return (
            f"the loader's workers returned no batch for {loader.timeout:g} s: a worker hangs, or a batch takes "
            "longer than that. If it does, pass a larger timeout=. Otherwise find out what the dataset waits for."
        )
    if not loader.num_workers or message.startswith("Caught "):
        return None
    if not isinstance(error, RuntimeError):  # the connection to a worker that was killed while it sent a batch
        message = f"a DataLoader worker died: {message}"
        try:
            time.sleep(_SIGNAL_WAIT_S)  # until SIGCHLD, whose handler raises, here or wherever it finds the process
        except RuntimeError as death:
            message = str(death)
    elif not message.startswith("DataLoader worker (pid"):
        return None
    return (
        f"{message.rstrip('. ')}. The usual reason for a killed worker is that the host or /dev/shm ran out of memory: "
        "use fewer workers, smaller batches or a larger /dev/shm."
    )
