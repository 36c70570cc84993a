"""How an uncaught error ends: said once, in the user's terms, and on every rank.

An error on one rank must end the job. Every launcher ends it when a process fails, provided the process really exits:
an engine's own exit handlers may wait for ranks that are still computing. So a failed process of a job ends at once.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from types import TracebackType
from typing import ClassVar

from unitrain.call_site import is_own
from unitrain.errors import ConfigError, LaunchError, UnitrainError
from unitrain.job.job import Job, current
from unitrain.job.messages import Verdict
from unitrain.launch.detect import Launch, detect
from unitrain.process import leave, tell

# An error of every rank (a bad setting) is rank 0's to tell; the others tell it if they are still there after this.
_PATIENCE_S = 5.0
# What an engine says of a rank that has gone may come before the news that it has.
_CAUSE_S = 3.0
_RANK_0_FIRST_S = 0.3


class _FailureHook:
    """An excepthook that knows which rank it is on."""

    _at_work: ClassVar[bool] = False

    def __init__(self) -> None:
        self._previous = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _FailureHook._at_work:
            # torch.distributed laid a hook of its own over the one it found, and calls that from within this one.
            self._previous(kind, error, trace)
            return
        _FailureHook._at_work = True
        try:
            self._end(kind, error, trace)
        finally:
            _FailureHook._at_work = False

    def _end(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        job, launch = current(), _launch()
        watch = None if job is None else job.watch
        if job is not None:
            job.failed = True
        if kind is KeyboardInterrupt and launch.world_size > 1:
            leave(130, "unitrain: interrupted" if launch.rank == 0 else "")
        code = error.exit_code if isinstance(error, UnitrainError) else 130 if kind is KeyboardInterrupt else 1
        # A wrong setting is wrong on every rank, and named in the message, wherever the script met it.
        of_all_ranks = isinstance(error, (ConfigError, LaunchError))
        if of_all_ranks and launch.rank > 0 and watch is None:
            if launch.launcher == "srun":  # it hands all tasks the same arguments, and does not end those that are left
                leave(code)
            time.sleep(_PATIENCE_S)
        verdict = None if job is None else _verdict(job, error, of_all_ranks)
        if verdict is not None and verdict.rank != launch.rank:
            leave(code, "" if of_all_ranks else f"unitrain: {watch}: stopped because {verdict.text}")
        if isinstance(error, UnitrainError):
            where = error.__cause__.place if isinstance(error.__cause__, RankError) else place(trace)
            tell(f"unitrain: error: {error}{'' if of_all_ranks else where}")
        else:
            self._previous(kind, error, trace)
        if launch.world_size > 1 and job is not None and not of_all_ranks:
            said = "" if isinstance(error, UnitrainError) else f": {summary(error)}"
            who = f"rank {launch.rank} of {launch.world_size} on {socket.gethostname()} (pid {os.getpid()})"
            tell(f"unitrain: {who} failed{said}")
        if launch.world_size > 1 or isinstance(error, UnitrainError):
            leave(code)


def _verdict(job: Job, error: BaseException, of_all_ranks: bool) -> Verdict | None:
    """Report this error to the other ranks, and learn which failure was the job's first; None where nobody knows."""
    if job.watch is None:
        return None
    patience, follows = 0.0, job.follows_from_another(error)
    if follows:
        patience = _CAUSE_S
    elif job.launch.rank > 0:  # an error of all ranks is rank 0's to report
        patience = _PATIENCE_S if of_all_ranks else _RANK_0_FIRST_S if isinstance(error, UnitrainError) else 0.0
    return job.watch.fail(summary(error), patience_s=patience, follows=follows, everywhere=of_all_ranks)


def _launch() -> Launch:
    job = current()
    if job is not None:
        return job.launch
    try:
        return detect(os.environ)
    except LaunchError:
        return Launch("python")


class RankError(Exception):
    """What is known of an exception that another process raised: it can't carry its traceback to this one.

    Args:
        rank: of the process.
        trace: the traceback, as text.
        place: what ``place`` returned there.
    """

    def __init__(self, rank: int, trace: str, place: str) -> None:
        super().__init__(f'\n"""\nrank {rank}: {trace}"""')
        self.place: str = f"{place} (rank {rank})" if place else f"\n  on rank {rank}"


def place(trace: TracebackType | None) -> str:
    """Name the last line of the user's own that led to an error, in a line to go below its message."""
    own = [(frame, line) for frame, line in traceback.walk_tb(trace) if is_own(frame)]
    if not own:
        return ""
    [last] = traceback.StackSummary.extract(own[-1:])
    return f"\n  at {last.filename}:{last.lineno}: {last.line}"


def summary(error: BaseException) -> str:
    """Return an error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def announce(error: BaseException) -> None:
    """Report to the other ranks an error that is shown otherwise than by the hook, before this process ends."""
    job = current()
    if job is not None and job.watch is not None:
        job.failed = True
        follows = job.follows_from_another(error)
        job.watch.fail(summary(error), patience_s=_CAUSE_S if follows else 0.0, follows=follows)


def install_hook() -> None:
    """Let uncaught errors end the way this module says, from now on."""
    if not isinstance(sys.excepthook, _FailureHook):
        sys.excepthook = _FailureHook()
