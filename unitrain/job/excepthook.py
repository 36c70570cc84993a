"""Handles uncaught exceptions: reports the error once, and ends the whole job.

Launchers end a job when a process fails, if the process really exits: the exit handlers of a communication library may
wait for ranks that are still computing. So a process of a job that fails exits without running them.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any, ClassVar, NoReturn

from unitrain.call_site import is_user_code
from unitrain.errors import BackendError, CommunicationError, ConfigError, LaunchError, UnitrainError
from unitrain.job import last_error
from unitrain.job.ending import end_for_others, is_succeeded
from unitrain.job.job import CAUSE_S, Job, current
from unitrain.job.watch.messages import Verdict
from unitrain.launch.detect import Launch, detect
from unitrain.launch.local_ranks import LocalRanks
from unitrain.process import exit_now, print_stderr

# An error on all ranks (a wrong setting) is reported by rank 0; the others report it if they still run after this.
_PATIENCE_S = 5.0
_RANK_0_FIRST_S = 0.3


class FailureHook:
    """The excepthook of a process of a job.

    Instances are callables with the signature of ``sys.excepthook``. The hook runs in the thread that failed to catch
    the error, which is the main thread.

    Attributes:
        exit_code: that the script has passed to ``sys.exit`` in its main thread; None if it has not called it.
    """

    _running: ClassVar[bool] = False
    exit_code: ClassVar[Any] = None

    def __init__(self) -> None:
        self._previous = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Report the error, end the other ranks, and exit."""
        if FailureHook._running:
            # torch.distributed wraps the excepthook that it finds, which is this one or its predecessor.
            self._previous(kind, error, trace)
            return
        FailureHook._running = True
        try:
            self._end(kind, error, trace)
        finally:
            FailureHook._running = False

    def _end(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """End this process as the error asks for: once the hub knows of it, and with one message in the whole job.

        The order matters. First this rank learns whether it is the one to report: an error that all ranks have is rank
        0's, and an error that follows from another rank's failure is not reported at all. Then it prints, and exits
        without handlers. It returns only in a world of one, where Python exits as it always does.
        """
        job, launch = current(), _launch()
        watch = None if job is None else job.watch
        if job is not None:
            job.failed = True
        # The terminal sends Ctrl-C to every rank, so one line for all of them is enough.
        if kind is KeyboardInterrupt and launch.world_size > 1:
            exit_now(130, "unitrain: interrupted" if launch.rank == 0 else "")
        code = error.exit_code if isinstance(error, UnitrainError) else 130 if kind is KeyboardInterrupt else 1
        # A wrong setting is wrong on every rank. Its message names it, so the line of the script does not matter.
        # So is a missing library, found before the ranks have met.
        on_all_ranks = (
            isinstance(error, ConfigError)
            or (isinstance(error, LaunchError) and error.on_all_ranks)
            or (isinstance(error, BackendError) and job is None)
        )
        if on_all_ranks and launch.rank > 0 and watch is None:
            # srun passes the same arguments to all tasks, and does not end the remaining ones.
            if launch.launcher == "srun" and not isinstance(error, BackendError):
                exit_now(code)
            time.sleep(_PATIENCE_S)
            ranks = LocalRanks(launch)
            if launch.local_world_size == launch.world_size and ranks.all_visible() and 0 not in ranks.present():
                exit_now(code)  # rank 0 has reported it; mpiexec of MPICH, for one, does not end the others either
        if job is None and is_succeeded() and isinstance(error, CommunicationError):  # another was never started
            end_for_others(f"unitrain: {error}", code)
        verdict = None if job is None else _verdict(job, error, on_all_ranks=on_all_ranks)
        if verdict is not None and verdict.rank != launch.rank:
            if on_all_ranks:
                exit_now(code)
            end_for_others(f"unitrain: {watch}: stopped because {verdict.text}", code)
        if isinstance(error, UnitrainError):
            # The traceback of a UniTrain error would show the library. Its message and the line of the script are
            # enough.
            where = error.__cause__.place if isinstance(error.__cause__, RankError) else place(trace)
            print_stderr(f"unitrain: error: {error}{'' if on_all_ranks else where}")
        else:
            try:
                self._previous(kind, error, trace)
            except Exception:  # a hook of the script's that fails must not keep this process from ending
                sys.__excepthook__(kind, error, trace)
        # Once it is printed: a home on another host may keep the write waiting.
        last_error.keep(f"{summary(error)}, on rank {launch.rank} of {launch.world_size}, by {launch.launcher}")
        if launch.world_size > 1 and job is not None and not on_all_ranks:
            reason = "" if isinstance(error, UnitrainError) else f": {summary(error)}"
            who = f"rank {launch.rank} of {launch.world_size} on {socket.gethostname()} (pid {os.getpid()})"
            if reason and job.is_secondary(error):
                reason += ". Another rank has ended, or has made other calls: UNITRAIN_DEBUG=true shows which."
            print_stderr(f"unitrain: {who} failed{reason}")
        # Not sys.exit: exit handlers of a communication library may wait for ranks that have gone.
        if launch.world_size > 1 or isinstance(error, UnitrainError):
            exit_now(code)


def _verdict(job: Job, error: BaseException, *, on_all_ranks: bool) -> Verdict | None:
    """Report this error to the hub, and return which failure was the first of the job; None if that is unknown.

    Blocks for up to ``CAUSE_S`` if the error follows from another rank's, since the hub may hear of that one later.
    """
    if job.watch is None:
        return None
    patience, secondary = 0.0, job.is_secondary(error)
    if secondary:
        patience = CAUSE_S
    elif job.launch.rank > 0:  # rank 0 reports an error that all ranks have
        patience = _PATIENCE_S if on_all_ranks else _RANK_0_FIRST_S if isinstance(error, UnitrainError) else 0.0
    return job.watch.fail(summary(error), patience_s=patience, secondary=secondary, on_all_ranks=on_all_ranks)


def _launch() -> Launch:
    """Return how this process was started; as a plain script if the launcher's variables are themselves the error."""
    job = current()
    if job is not None:
        return job.launch
    try:
        return detect(os.environ)
    except LaunchError:
        return Launch("python")


class RankError(Exception):
    """The cause of an exception that another process raised: holds its traceback, which can't be pickled.

    Args:
        rank: the rank that raised the exception.
        trace: its formatted traceback.
        place: the result of the function ``place`` in that process.

    Attributes:
        place: where the error was raised, formatted as a line below the error message.
    """

    def __init__(self, rank: int, trace: str, place: str) -> None:
        super().__init__(f'\n"""\nrank {rank}: {trace}"""')
        self.place: str = f"{place} (rank {rank})" if place else f"\n  on rank {rank}"


def place(trace: TracebackType | None) -> str:
    """Return the last line of user code in a traceback, formatted as a line below the error message."""
    user_frames = [(frame, line) for frame, line in traceback.walk_tb(trace) if is_user_code(frame)]
    if not user_frames:
        return ""
    [last] = traceback.StackSummary.extract(user_frames[-1:])
    return f"\n  at {last.filename}:{last.lineno}: {last.line}"


def summary(error: BaseException) -> str:
    """Return the type and the first line of an error, as ``ValueError: the line``, for other ranks' messages."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def report(error: BaseException) -> None:
    """Report an error to the hub before this process ends. For errors that do not reach the excepthook.

    The caller prints the error, and ends the process. Blocks while the hub decides, for seconds at most.
    """
    job = current()
    if job is not None:
        job.failed = True
        _verdict(job, error, on_all_ranks=False)


def install_hook() -> None:
    """Install the excepthook of this module, once, and ``exit_script``. Later hooks of the script replace them."""
    if not isinstance(sys.excepthook, FailureHook):
        sys.excepthook = FailureHook()
    sys.exit = exit_script


def exit_script(code: Any = None, /) -> NoReturn:
    """Exit as ``sys.exit`` does, which this replaces, and note the code: Python does not tell it to exit handlers."""
    if threading.current_thread() is threading.main_thread():
        FailureHook.exit_code = code
    raise SystemExit(code)
