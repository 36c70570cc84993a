"""``unitrain.spawn``: starts the ranks of a job as child processes of a script."""

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

from unitrain.errors import CommunicationError, UnitrainError, UsageError
from unitrain.job import excepthook
from unitrain.job.job import CAUSE_S, current
from unitrain.launch.network.tcp_store import open_on_loopback
from unitrain.launch.variables import OVERRIDE
from unitrain.process import end_with_parent, exit_now

# How long the others get after a rank has called sys.exit (unitrain.Stopped, say): they usually do the same.
_LEAVE_S = 10.0
# How long to wait for further reports after the first failure: a rank's death may be noticed after its consequences.
# An error of a communication library says that another rank is to blame, and the hub says which one in CAUSE_S.
_SETTLE_S = 0.5
# Between SIGTERM and SIGKILL. A rank that waits inside a collective does not run its signal handlers.
_TERMINATE_S = 2.0
# How often to check for dead processes: children of a dead rank can keep its pipe open.
_CHECK_S = 0.25


def spawn(fn: Callable[..., object], *args: Any, nprocs: int | None = None) -> None:
    """Start ``nprocs`` processes on this host as the ranks of one job, run ``fn(*args)`` in each, and wait for them.

    ``fn`` calls ``unitrain.init`` itself. ``fn`` and ``args`` are pickled, so ``fn`` must be defined at the top level
    of a module. A script calls ``spawn`` under ``if __name__ == "__main__":``, since every rank imports it again.

    Args:
        fn: the function that every rank runs. Its result is discarded.
        *args: its arguments, the same on all ranks.
        nprocs: number of ranks. Default: one per visible GPU.

    Raises:
        UsageError: ``nprocs`` is less than 1, or missing without a GPU; or the new processes can't import ``fn``.
        CommunicationError: a rank died without an exception.
        BaseException: the exception of the first rank that failed, with its rank and traceback as the cause. The
            other ranks are ended first.
    """
    # For this process as well, which has no strategy: a rank's error is printed here as it would be there.
    excepthook.install_hook()
    nprocs = number_of_ranks("spawn", nprocs)
    _check_importable(fn)
    with spawn_environments(nprocs) as environments:
        run_processes(fn, args, environments, multiprocessing.get_context("spawn"))


def number_of_ranks(function: str, nprocs: int | None) -> int:
    """Return the number of ranks to start: ``nprocs``, or one per visible GPU.

    Args:
        function: the name of the function that the script has called, for messages.
        nprocs: its argument.

    Raises:
        UsageError: there is no GPU, or ``nprocs`` is less than 1.
    """
    if nprocs is None:
        nprocs = torch.accelerator.device_count()
        if nprocs == 0:
            raise UsageError(
                f"unitrain.{function} starts one process per GPU by default, but there is none: pass nprocs=N."
            )
    if nprocs < 1:
        raise UsageError(f"unitrain.{function}: nprocs is {nprocs}, but must be at least 1.")
    return nprocs


def _check_importable(fn: Callable[..., object]) -> None:
    """Raise UsageError if the new processes couldn't import the script: from stdin, or in a notebook."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if main.__spec__ is None and (not os.path.exists(file) if file else fn.__module__ == "__main__"):
        raise UsageError(
            "unitrain.spawn starts processes that import the function again, but this script was read from stdin, "
            "typed in, or is a notebook: put the function into a file, and import it from there; or run the whole "
            "script from a cell: !torchrun --nproc-per-node 2 train.py."
        )


@contextmanager
def spawn_environments(nprocs: int) -> Iterator[list[dict[str, str]]]:
    """Yield the environments of ``nprocs`` ranks, and keep the store open that serves their rendezvous.

    Args:
        nprocs: number of ranks, all on this host.
    """
    store = open_on_loopback(0)
    job = {
        OVERRIDE: "spawn",
        "WORLD_SIZE": str(nprocs),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        # torch's variable for a store that the launcher keeps open: no rank opens another on this port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    yield [{**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(nprocs)]


@dataclass
class _Report:
    """How a rank ended, as reported by itself.

    Attributes:
        result: what its function has returned.
        error: its exception, which can be pickled; None if it has ended without one.
        trace: the traceback of the exception, formatted.
    """

    result: Any = None
    error: BaseException | None = None
    trace: str = ""
    place: str = ""
    """The line of user code that led to the error."""
    at: float = 0.0
    """When it failed, by the monotonic clock, which the processes of a host share."""
    settle_s: float = _SETTLE_S
    """How long to wait for other reports."""


def run_processes(
    fn: Callable[..., object],
    args: tuple[Any, ...],
    environments: Sequence[Mapping[str, str]],
    context: SpawnContext | ForkServerContext,
    timeout_s: float | None = None,
) -> list[Any]:
    """Run ``fn(*args)`` in one process per environment, and return their results.

    Blocks until all have ended. On Ctrl-C, each rank gets time to save its open checkpoint.

    Args:
        fn: the function, at the top level of a module.
        args: its arguments, which can be pickled.
        environments: the environment of each rank, which must be complete.
        context: how processes are started: anew, or forked from a server.
        timeout_s: time limit in seconds; None for none.

    Raises:
        TimeoutError: a process had not ended after ``timeout_s``.
        CommunicationError: a process died without an exception.
        BaseException: the exception of the first process that failed. All processes are ended in each of these cases.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    processes: list[BaseProcess] = []
    receivers: list[Connection] = []
    try:
        for environ in environments:
            receiver, sender = context.Pipe(duplex=False)
            receivers.append(receiver)
            # The parent closes its copy, so that the end of the rank closes the pipe.
            with sender:
                process = context.Process(target=run_rank, args=(sender, dict(environ), fn, args))
                process.start()
            processes.append(process)
        results = collect(processes, receivers, deadline)
        join(processes, deadline)
        return results
    except KeyboardInterrupt:
        # The terminal has sent Ctrl-C to the ranks as well.
        end(processes, _LEAVE_S)  # a rank with an open checkpoint saves it first
        raise
    finally:
        end(processes)
        for receiver in receivers:
            receiver.close()


def collect(processes: list[BaseProcess], receivers: list[Connection], deadline: float | None) -> list[Any]:
    """Return the results of all processes, in order. Raise the first failure, after ending all processes.

    Args:
        processes: the started processes, by rank.
        receivers: the pipe of each, through which it sends one report.
        deadline: when to give up, by the monotonic clock; None for never.
    """
    reports: dict[int, _Report] = {}
    # A failure may be the consequence of one that is reported a moment later, so the first report is not taken at once.
    settled_at = math.inf
    while len(reports) < len(processes) and time.monotonic() < settled_at:
        waiting = [rank for rank in range(len(processes)) if rank not in reports]
        ready = wait([receivers[rank] for rank in waiting], _CHECK_S)
        for rank in waiting:
            if receivers[rank] in ready or processes[rank].exitcode is not None:
                reports[rank] = _receive(rank, processes[rank], receivers[rank])
        if all(report.error is None for report in reports.values()):
            _check_deadline(deadline, [rank for rank in waiting if rank not in reports])
        elif settled_at == math.inf:
            settled_at = time.monotonic() + max(report.settle_s for report in reports.values())
    failed = [rank for rank, report in reports.items() if report.error is not None]
    if failed:
        first = min(failed, key=lambda rank: reports[rank].at)
        _fail(first, reports[first], processes)
    return [reports[rank].result for rank in range(len(processes))]


def join(processes: list[BaseProcess], deadline: float | None) -> None:
    """Wait until processes that have reported end, and raise CommunicationError if one ends with an error."""
    for rank, process in enumerate(processes):
        process.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            _check_deadline(deadline, [rank])
        elif process.exitcode != 0:
            raise _death(rank, process)


def _check_deadline(deadline: float | None, late: list[int]) -> None:
    """Raise TimeoutError if there are late ranks, and the deadline has passed."""
    if late and deadline is not None and time.monotonic() >= deadline:
        raise TimeoutError(f"these ranks did not end in time: {late}")


def _receive(rank: int, process: BaseProcess, receiver: Connection) -> _Report:
    """Return the report of a rank, or one that says how the rank died. Blocks for seconds at most."""
    try:
        if not receiver.poll():  # dead, and one of its children keeps its pipe open
            raise EOFError
        report = pickle.loads(receiver.recv_bytes())
    except EOFError:
        process.join(_TERMINATE_S)
        # A death is the cause of the errors in other ranks, unless it is a consequence of one itself: a communication
        # library may abort the process, and the watch ends it with exit code 1.
        secondary = process.exitcode in (-signal.SIGABRT, 1)
        return _Report(error=_death(rank, process), at=math.inf if secondary else -math.inf)
    assert isinstance(report, _Report)
    return report


def _death(rank: int, process: BaseProcess) -> CommunicationError:
    """Return the error of a rank that has ended without a report."""
    code = process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return CommunicationError(f"rank {rank} (pid {process.pid}) {how} before it had finished.")


def _fail(rank: int, report: _Report, processes: list[BaseProcess]) -> None:
    """End all processes, and raise the error of the rank that failed first."""
    assert report.error is not None
    if isinstance(report.error, SystemExit):
        # They stop at the same boundary, and may still be writing their checkpoint.
        leave_by = time.monotonic() + _LEAVE_S
        for process in processes:
            process.join(max(0.0, leave_by - time.monotonic()))
    end(processes)
    raise report.error from (excepthook.RankError(rank, report.trace, report.place) if report.trace else None)


def end(processes: list[BaseProcess], patience_s: float = _TERMINATE_S) -> None:
    """End all processes, with SIGTERM and after ``patience_s`` seconds with SIGKILL. Return when all have ended."""
    for process in processes:
        if process.exitcode is None:
            process.terminate()
    kill_at = time.monotonic() + patience_s
    for process in processes:
        process.join(max(0.0, kill_at - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()


def run_rank(sender: Connection, environ: dict[str, str], fn: Callable[..., object], args: tuple[Any, ...]) -> None:
    """Run ``fn(*args)`` as one rank in this process, and report its result. End the process if it fails.

    Args:
        sender: takes the report, once.
        environ: the environment of the rank.
        fn: the function to run.
        args: its arguments.
    """
    # A rank is killed when its parent dies. A forkserver, the parent of the processes that it forks, ends with the
    # process that started it.
    end_with_parent()
    # A forked process has its server's environment, of an earlier time.
    os.environ.clear()
    os.environ.update(environ)
    try:
        # Pickled within the block: a result that can't be is an error of this rank.
        message = pickle.dumps(_Report(result=fn(*args)))
    except SystemExit as error:
        failure = _portable(error) if error.code else None
        sender.send_bytes(pickle.dumps(_Report(error=failure, at=time.monotonic())))
        raise
    except BaseException as error:
        # Reported before the watch ends this process; the error itself is sent, so that the parent can raise it.
        at, place = time.monotonic(), excepthook.place(error.__traceback__)
        job = current()
        settle_s = _SETTLE_S + CAUSE_S if job is not None and job.is_secondary(error) else _SETTLE_S
        report = _Report(error=_portable(error), trace=traceback.format_exc(), place=place, at=at, settle_s=settle_s)
        sender.send_bytes(pickle.dumps(report))
        excepthook.report(error)
        exit_now(1)  # without exit handlers, which may wait for other ranks
    sender.send_bytes(message)


def _portable(error: BaseException) -> BaseException:
    """Return the error, or a UnitrainError with the same message if it can't be pickled."""
    try:
        # An exception with other arguments in its __init__ can often be pickled, but not read again.
        pickle.loads(pickle.dumps(error))
    except Exception:
        return UnitrainError(f"{type(error).__name__}: {error}")
    return error
