"""``unitrain.spawn``: the ranks of a job as child processes of one script."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.distributed import TCPStore

from unitrain.errors import CommunicationError, UnitrainError, UsageError
from unitrain.job import excepthook
from unitrain.launch.detect import OVERRIDE
from unitrain.process import end_with_parent

# A rank that ends by sys.exit (unitrain.Stopped is such an end) seldom does so alone: the others get this long.
_LEAVE_S = 10.0
# A rank's death can become known a little after the errors that it causes in other ranks.
_SETTLE_S = 0.5
# Between SIGTERM and SIGKILL. A rank that waits inside a collective does not run its signal handlers.
_TERMINATE_S = 2.0
# How often to look for dead processes: a dead rank's own children can keep its pipe open.
_LOOK_S = 0.25


def spawn(fn: Callable[..., object], *args: Any, nprocs: int | None = None) -> None:
    """Run ``fn(*args)`` in new processes of this host that are the ranks of one job, and wait for them.

    ``fn`` calls ``unitrain.init`` itself. It and ``args`` are pickled, so it is defined at the top of a module; a
    script calls ``spawn`` under ``if __name__ == "__main__":``, since every rank imports the script again.

    Args:
        fn: what every rank does; what it returns is dropped.
        *args: its arguments, the same for all ranks.
        nprocs: the number of ranks; default: one for each visible GPU.

    Raises:
        UsageError: ``nprocs`` is missing where there is no GPU, or less than 1; or something can't be pickled.
        CommunicationError: a rank died without an exception.
        BaseException: what the first rank to fail raised, with its rank and traceback as the cause. The other ranks
            are ended first.
    """
    excepthook.install_hook()
    if nprocs is None:
        nprocs = torch.cuda.device_count()
        if nprocs == 0:
            raise UsageError("unitrain.spawn starts one process for each GPU, and there is none: give it nprocs=N.")
    if nprocs < 1:
        raise UsageError(f"unitrain.spawn was given nprocs={nprocs}; it takes 1 or more.")
    try:
        pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"unitrain.spawn hands its function and arguments to other processes, and these can't be: {error}. Define "
            "the function at the top of a module, and make in it what can't be pickled."
        ) from error
    with spawn_environments(nprocs) as environments:
        run_processes(fn, args, environments, multiprocessing.get_context("spawn"))


@contextmanager
def spawn_environments(nprocs: int) -> Iterator[list[dict[str, str]]]:
    """Give the environment of each of ``nprocs`` ranks, and keep the store open in which they meet."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {
        OVERRIDE: "spawn",
        "WORLD_SIZE": str(nprocs),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        # torch's own word for a store that the launcher keeps: no rank tries to open another at this port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    yield [{**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(nprocs)]


@dataclass
class _Report:
    """How a rank ended, as it says itself."""

    result: Any = None
    error: BaseException | None = None
    trace: str = ""
    place: str = ""
    """The script's own line that led to a UnitrainError."""
    at: float = 0.0
    """When it failed; the clocks of one host's processes can be compared."""


def run_processes(
    fn: Callable[..., object],
    args: tuple[Any, ...],
    environments: Sequence[Mapping[str, str]],
    context: SpawnContext | ForkServerContext,
    timeout_s: float | None = None,
) -> list[Any]:
    """Run ``fn(*args)`` in one process for each of ``environments`` (complete ones) and return what each returned.

    Raises:
        TimeoutError: some had not ended after ``timeout_s``.
        CommunicationError: a process died without an exception.
        BaseException: what the first process to fail raised. No process is left in any of these cases.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    processes: list[BaseProcess] = []
    receivers: list[Connection] = []
    try:
        for environ in environments:
            receiver, sender = context.Pipe(duplex=False)
            receivers.append(receiver)
            with sender:
                process = context.Process(target=_run, args=(sender, dict(environ), fn, args))
                process.start()
            processes.append(process)
        return _collect(processes, receivers, deadline)
    finally:
        _end(processes)
        for receiver in receivers:
            receiver.close()


def _collect(processes: list[BaseProcess], receivers: list[Connection], deadline: float | None) -> list[Any]:
    """Return every process's result, or raise the first failure."""
    reports: dict[int, _Report] = {}
    settled_at = math.inf
    while len(reports) < len(processes) and time.monotonic() < settled_at:
        waiting = [rank for rank in range(len(processes)) if rank not in reports]
        ready = wait([receivers[rank] for rank in waiting], _LOOK_S)
        for rank in waiting:
            if receivers[rank] in ready or processes[rank].exitcode is not None:
                reports[rank] = _receive(rank, processes[rank], receivers[rank])
        if all(report.error is None for report in reports.values()):
            _check_deadline(deadline, [rank for rank in waiting if rank not in reports])
        elif settled_at == math.inf:
            settled_at = time.monotonic() + _SETTLE_S
    failed = [rank for rank, report in reports.items() if report.error is not None]
    if failed:
        first = min(failed, key=lambda rank: reports[rank].at)
        _fail(first, reports[first], processes)
    for rank, process in enumerate(processes):  # what is left to do after the report is to close down
        process.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            _check_deadline(deadline, [rank])
        elif process.exitcode != 0:
            raise _death(rank, process)
    return [reports[rank].result for rank in range(len(processes))]


def _check_deadline(deadline: float | None, late: list[int]) -> None:
    if late and deadline is not None and time.monotonic() >= deadline:
        raise TimeoutError(f"not all ranks ended in time; {late} did not")


def _receive(rank: int, process: BaseProcess, receiver: Connection) -> _Report:
    try:
        if not receiver.poll():  # dead, and its pipe is kept open by a child of its own
            raise EOFError
        report = pickle.loads(receiver.recv_bytes())
    except EOFError:
        process.join(_TERMINATE_S)
        # A death comes before the errors that it causes in other ranks, unless it is their way to end with them: an
        # engine's (it aborts) or the watch's (it leaves with 1).
        caused = process.exitcode in (-signal.SIGABRT, 1)
        return _Report(error=_death(rank, process), at=math.inf if caused else -math.inf)
    assert isinstance(report, _Report)
    return report


def _death(rank: int, process: BaseProcess) -> CommunicationError:
    code = process.exitcode or 0
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
    return CommunicationError(f"rank {rank} (pid {process.pid}) {how} without having finished.")


def _fail(rank: int, report: _Report, processes: list[BaseProcess]) -> None:
    assert report.error is not None
    if isinstance(report.error, SystemExit):
        leave_by = time.monotonic() + _LEAVE_S
        for process in processes:
            process.join(max(0.0, leave_by - time.monotonic()))
    _end(processes)
    raise report.error from (excepthook.RankError(rank, report.trace, report.place) if report.trace else None)


def _end(processes: list[BaseProcess]) -> None:
    """Leave none of the processes alive."""
    for process in processes:
        if process.exitcode is None:
            process.terminate()
    kill_at = time.monotonic() + _TERMINATE_S
    for process in processes:
        process.join(max(0.0, kill_at - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()


def _run(sender: Connection, environ: dict[str, str], fn: Callable[..., object], args: tuple[Any, ...]) -> None:
    """Be one rank: what a child process does."""
    # Whoever kills the parent kills its ranks. A forkserver, the parent of the processes that it forks, ends with the
    # process that started it.
    end_with_parent()
    os.environ.clear()
    os.environ.update(environ)
    try:
        message = pickle.dumps(_Report(result=fn(*args)))
    except SystemExit as error:
        failure = _portable(error) if error.code else None
        sender.send_bytes(pickle.dumps(_Report(error=failure, at=time.monotonic())))
        raise
    except BaseException as error:
        at, place = time.monotonic(), excepthook.place(error.__traceback__)
        report = _Report(error=_portable(error), trace=traceback.format_exc(), place=place, at=at)
        sender.send_bytes(pickle.dumps(report))
        excepthook.announce(error)
        # Exit handlers may wait for ranks that will not come.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    sender.send_bytes(message)


def _portable(error: BaseException) -> BaseException:
    """Return the error, or one that says the same where it can't be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return UnitrainError(f"{type(error).__name__}: {error}")
    return error
