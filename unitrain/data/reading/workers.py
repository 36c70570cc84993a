"""DataLoader workers: their default number and timeout, how they end, and messages for their failures."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import psutil
import torch
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, Subset, TensorDataset

from unitrain.config import StrategyConfig
from unitrain.device import IN_STEP
from unitrain.errors import DataError
from unitrain.process import end_with_parent, usable_cores

T = TypeVar("T")

_SIGNAL_WAIT_S = 2.0
_CHECK_S = 0.5
_DEATH = "DataLoader worker (pid"
_STOPPED = (
    "worker {} was stopped (SIGSTOP), by a person, a debugger or a scheduler. Let it continue within the loader's "
    "timeout (kill -CONT), or pass a larger timeout=."
)
_timeouts: WeakKeyDictionary[Any, float] = WeakKeyDictionary()  # of the loaders of workers
_seen_stopped: set[int] = set()  # workers, by their ids, that were stopped


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


# Have forked processes never collect what was garbage in this one. A tensor of a GPU, in a cycle of the model of an
# earlier fold, say, can't be freed in a forked process: its destructor ends the worker (SIGABRT).
os.register_at_fork(after_in_child=gc.freeze)


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


def _watch(batches: Any, timeout_s: float) -> None:
    """Have torch end workers that it no longer needs without an error, and explain how others have ended."""
    for worker in getattr(batches, "_workers", ()):
        worker._popen.terminate = partial(_end, id(batches), worker._popen)
        _timeouts[worker] = timeout_s
    handler = signal.getsignal(signal.SIGCHLD)  # torch's, once there are workers
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and callable(handler) and not isinstance(handler, _ChildHandler) and _timeouts:
        signal.signal(signal.SIGCHLD, _ChildHandler(handler))


def _end(batches: int, popen: Any) -> None:
    """Kill a worker, which ignores SIGTERM. In place of ``terminate``, which also Python's exit calls."""
    with suppress(ValueError):  # torch has forgotten them already
        _remove_worker_pids(batches)  # else their end is an error, which is printed after the run's own end
    popen.kill()


class _ChildHandler:
    """The handler of SIGCHLD: has torch's raise its error with a remedy, wherever the main thread is.

    A worker may also have been stopped. Then ``next`` may wait where no timeout counts, in the middle of a message.
    """

    def __init__(self, previous: Callable[[int, Any], Any]) -> None:
        self._previous = previous

    def __call__(self, number: int, frame: Any) -> None:
        for worker in _stopped(_timeouts):
            if _timeouts[worker] and worker.pid not in _seen_stopped:
                _seen_stopped.add(worker.pid)
                threading.Thread(target=_end_stopped, args=(worker, _timeouts[worker]), daemon=True).start()
        try:
            self._previous(number, frame)
        except RuntimeError as error:
            if not str(error).startswith(_DEATH):
                raise
            raise DataError(_explained(str(error))) from error


def _end_stopped(worker: Any, timeout_s: float) -> None:
    """Kill a worker that stays stopped longer than the loader's timeout."""
    waited_s = 0.0  # not by a clock: while this process is suspended, too, it does not wait
    while _stopped([worker]):
        if waited_s >= timeout_s:
            worker.kill()
            return
        time.sleep(_CHECK_S)
        waited_s += _CHECK_S
    _seen_stopped.discard(worker.pid)


def _stopped(workers: Iterable[Any]) -> list[Any]:
    """Return those workers that are stopped."""
    stopped = []
    for worker in list(workers):
        with suppress(psutil.Error, ValueError):  # it has ended
            if psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED:
                stopped.append(worker)
    return stopped


def default_workers(dataset: Any, device: torch.device, local_world_size: int, most: int) -> int:
    """Return the default number of workers.

    On a GPU, it is this process's share of the host's cores minus one, at most ``most``. On a CPU, whose cores are
    needed for training, and for data in memory, it is 0.
    """
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    in_memory = isinstance(dataset, (TensorDataset, list, tuple))
    if device.type == "cpu" or in_memory:  # sending a batch between processes takes longer than reading it
        return 0
    # A process that was pinned to cores has these alone; otherwise all processes of the host see all of its cores.
    cores = min(usable_cores(), (os.cpu_count() or 1) // local_world_size)
    return max(0, min(cores - 1, most))


def with_deaths_explained(loader: DataLoader[T]) -> Iterator[T]:
    """Yield from a DataLoader, and raise a DataError with a remedy if workers die or time out.

    Exceptions of the dataset in a worker are raised unchanged, with the worker's traceback.

    Args:
        loader: the DataLoader, which starts its workers now unless they are persistent.

    Raises:
        DataError: a worker died, or returned no batch within the timeout.
    """
    batches = iter(loader)
    _watch(batches, loader.timeout)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (RuntimeError, ConnectionError, EOFError) as error:
            reason = _death(error, loader, getattr(batches, "_workers", ()))
            if reason is None:
                raise
            raise DataError(reason) from error
        yield batch


def _death(error: Exception, loader: DataLoader[Any], workers: Iterable[Any]) -> str | None:
    """Return a message for an error of a DataLoader about its workers; None for an exception of the dataset."""
    message = str(error)
    if message.startswith("DataLoader timed out"):
        stopped = ", ".join(str(worker.pid) for worker in _stopped(workers))
        if stopped:
            return f"the loader's workers returned no batch for {loader.timeout:g} s: {_STOPPED.format(stopped)}"
        return (
            f"the loader's workers returned no batch for {loader.timeout:g} s: a worker hangs, or a batch takes "
            "longer than that. If it does, pass a larger timeout=. Otherwise find out what the dataset waits for."
        )
    if not loader.num_workers or message.startswith("Caught "):
        return None
    if not isinstance(error, RuntimeError):  # the connection to a worker that was killed while it sent a batch
        message = f"a DataLoader worker died: {message}"
        time.sleep(_SIGNAL_WAIT_S)  # until SIGCHLD, whose handler raises, here or wherever it finds the process
    elif not message.startswith(_DEATH):
        return None
    return _explained(message)


def _explained(message: str) -> str:
    """Return torch's message for the death of a worker, with a remedy."""
    pid = re.search(r"\d+", message)
    if pid and int(pid[0]) in _seen_stopped and "signal" in message:
        return f"the loader's workers did not go on within its timeout: {_STOPPED.format(pid[0])}"
    return (
        f"{message.rstrip('. ')}. The usual reason for a killed worker is that the host or /dev/shm ran out of memory: "
        "use fewer workers, smaller batches or a larger /dev/shm."
    )
