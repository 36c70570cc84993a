"""Duties that are tried: done by the ranks of a world, one after another, with a verdict on each."""

from __future__ import annotations

import faulthandler
import os
import pickle
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from unitrain.job.excepthook import summary
from unitrain.launch.detect import detect
from unitrain.testing.duty import Duty
from unitrain.testing.worlds import World

LIMIT_S = 60.0
"""How long one duty may take. Most take a tenth of a second."""
_SHOWN_CHARACTERS = 3000


@dataclass(frozen=True)
class Failure:
    """Why a duty is not done."""

    owed: str
    """The world, and what it owes."""
    details: str
    error: str = ""
    """The error of the first rank that has one, in a line."""

    def __str__(self) -> str:
        return f"{self.owed}\n{self.details}"


Outcomes = dict[tuple[World, str], Failure | None]
"""What became of each duty of each world that was tried, in order."""


def try_duties(world: World, duties: Sequence[Duty], outcomes: Outcomes, limit_s: float = LIMIT_S) -> None:
    """Start a world's ranks, have them do duties in turn up to the first that fails, and take note of the outcomes.

    Args:
        world: whose ranks are started, once.
        duties: to be done. If one is to end the job, it is the only one.
        outcomes: where what becomes of the duties that were tried is added.
        limit_s: how long one duty may take.
    """
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for duty in duties:
            (folder / duty.name / "shared").mkdir(parents=True)
        work = [(duty.name, duty.function, duty.arguments) for duty in duties]
        ended = ""
        try:
            world.run(_do_in_turn, world, work, folder, limit_s, timeout=limit_s * (len(work) + 1))
        except (KeyboardInterrupt, pytest.exit.Exception):
            raise
        except BaseException as error:  # pytest's own failures and SystemExit among them
            ended = "".join(traceback.format_exception_only(error)).strip()
        for duty in duties:
            attempt = _Attempt.read(folder / duty.name, world.processes)
            outcomes[world, duty.name] = _judged(world, duty, attempt, ended)
            if not attempt.is_done:
                return
        if ended and not duties[-1].ending:
            details = f"every duty was done, but then the processes did not end well: {ended}"
            outcomes[world, duties[-1].name] = Failure(_owed(world, duties[-1]), details)


# ------------------------------------------------------------------------------------------------------ on a rank


@dataclass(frozen=True)
class _Report:
    """What a rank says of a duty."""

    returned: Any = None
    error: str = ""
    """In a line."""
    trace: str = ""
    """The error with its traceback."""
    at: float = 0.0
    """When it was raised; the clocks of one host's processes can be compared."""

    @staticmethod
    def of(error: BaseException) -> _Report:
        """Report an error that a duty raised."""
        own = error.__traceback__.tb_next if error.__traceback__ is not None else None
        trace = "".join(traceback.format_exception(type(error), error, own)).strip()
        return _Report(error=summary(error), trace=trace, at=time.monotonic())


def _do_in_turn(
    world: World, work: Sequence[tuple[str, Callable[..., Any], tuple[Any, ...]]], folder: Path, limit_s: float
) -> None:
    rank = detect(os.environ).rank
    for name, function, arguments in work:
        report = folder / name / f"report {rank}"
        with _output_to(folder / name / f"output {rank}"):
            # It needs neither the main thread, which may wait in the library, nor the GIL.
            faulthandler.dump_traceback_later(limit_s, exit=True)
            try:
                returned = function(replace(world, folder=folder / name / "shared"), *arguments)
                report.write_bytes(pickle.dumps(_Report(returned)))
            except BaseException as error:
                report.write_bytes(pickle.dumps(_Report.of(error)))
                raise
    faulthandler.dump_traceback_later(limit_s, exit=True)  # for the end of the process


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Send what this process prints, and what libraries print in it, to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with open(path, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, original in enumerate(kept, start=1):
            os.dup2(original, number)
            os.close(original)


# --------------------------------------------------------------------------------------------- outside of the ranks


@dataclass(frozen=True)
class _Attempt:
    """What is known of a duty that was tried."""

    reports: Sequence[_Report | None]
    """Of each rank; None where it came to no end."""
    output: Sequence[str]
    """What each rank printed."""

    @staticmethod
    def read(folder: Path, processes: int) -> _Attempt:
        """Read what the ranks left."""
        reports: list[_Report | None] = []
        output = []
        for rank in range(processes):
            try:
                reports.append(pickle.loads((folder / f"report {rank}").read_bytes()))
            except (OSError, EOFError, pickle.UnpicklingError):  # it was killed, perhaps while it wrote
                reports.append(None)
            path = folder / f"output {rank}"
            output.append(path.read_text(errors="replace").strip() if path.exists() else "")
        return _Attempt(reports, output)

    @property
    def errors(self) -> dict[int, _Report]:
        """The reports of the ranks that have an error."""
        return {rank: report for rank, report in enumerate(self.reports) if report is not None and report.error}

    @property
    def is_done(self) -> bool:
        """Whether every rank came to a good end."""
        return all(report is not None and not report.error for report in self.reports)

    def explain(self, ended: str) -> str:
        """Say what went wrong: the first error in full, the others in a line, and what the ranks printed.

        Args:
            ended: how the processes ended.
        """
        by_time = sorted(self.errors, key=lambda rank: self.errors[rank].at)
        said = [
            f"rank {rank}: {self.errors[rank].trace if i == 0 else self.errors[rank].error}"
            for i, rank in enumerate(by_time)
        ]
        if not said:
            said = [ended or "some ranks did not come to its end"]
        said += [
            f"---- what rank {rank} printed ----\n{text[-_SHOWN_CHARACTERS:]}"
            for rank, text in enumerate(self.output)
            if text
        ]
        return "\n".join(said)


def _owed(world: World, duty: Duty) -> str:
    return f"{world} owes: {duty.demand}"


def _judged(world: World, duty: Duty, attempt: _Attempt, ended: str) -> Failure | None:
    """Return why a duty is not done, or None."""
    owed = _owed(world, duty)
    if duty.ending is not None:
        if not ended:
            return Failure(owed, "The job did not end with an error.")
        said = f"{ended}\n{attempt.explain(ended)}"
        return None if re.search(duty.ending, said) else Failure(owed, f"Nobody said {duty.ending!r}:\n{said}")
    if not attempt.is_done:
        error = next((report.error for report in attempt.errors.values()), "")
        # What was asserted differs between duties, though it may not say so.
        return Failure(owed, attempt.explain(ended), "" if error.startswith("AssertionError") else error)
    if duty.judge is not None:
        try:
            duty.judge(world, *duty.arguments, [report.returned for report in attempt.reports if report is not None])
        except AssertionError as error:
            return Failure(owed, str(error))
        except Exception:
            return Failure(owed, f"what the ranks returned can't be judged: {traceback.format_exc()}")
    return None
