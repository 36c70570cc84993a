"""Runs duties on the ranks of a world, one after another, and judges the result of each."""

from __future__ import annotations

import faulthandler
import os
import pickle
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
"""Time limit of one duty, in seconds. Most take a tenth of a second."""
_SHOWN_CHARACTERS = 8000
# The last line that Python prints when a process crashes. It is long, and no help.
_EXTENSION_MODULES = re.compile(r"^Extension modules: .*\(total: \d+\)$", re.MULTILINE)


@dataclass(frozen=True)
class Failure:
    """Why a duty failed."""

    title: str
    """The world and the duty, in one line."""
    details: str
    error: str = ""
    """The error of the first rank that has one, in one line."""

    def __str__(self) -> str:
        return f"{self.title}\n{self.details}"


Outcomes = dict[tuple[World, str], Failure | None]
"""Result of each duty of each world that was run, in order; None if it passed."""


def try_duties(world: World, duties: Sequence[Duty], outcomes: Outcomes, limit_s: float = LIMIT_S) -> None:
    """Start the ranks of a world once, run duties on them in turn, up to the first that fails, and add the outcomes.

    A duty with an ``ending`` must be the only one. Each duty may take ``limit_s`` seconds.
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
        except BaseException as error:  # including pytest's failures and SystemExit
            ended = "".join(traceback.format_exception_only(error)).strip()
        for duty in duties:
            reports = [_Report.read(folder / duty.name, rank) for rank in range(world.processes)]
            outcomes[world, duty.name] = _judged(world, duty, reports, ended)
            if not all(report.is_done for report in reports):
                return
        if ended and not duties[-1].ending:
            details = f"all duties passed, but then the processes failed: {ended}"
            outcomes[world, duties[-1].name] = Failure(_title(world, duties[-1]), details)


@dataclass(frozen=True)
class _Report:
    """Result of a duty on one rank. The default is what is known of a rank that has not finished the duty."""

    is_done: bool = False
    """Whether the rank has finished the duty without an error."""
    returned: Any = None
    error: str = ""
    """The error in one line, or an empty string."""
    trace: str = ""
    """The error with its traceback."""
    at: float = 0.0
    """Time of the error, on the monotonic clock, which all processes of a host share."""
    output: str = ""

    @staticmethod
    def of(error: BaseException) -> _Report:
        """Return the report of an error that a duty raised."""
        own = error.__traceback__.tb_next if error.__traceback__ is not None else None
        trace = "".join(traceback.format_exception(type(error), error, own)).strip()
        return _Report(error=summary(error), trace=trace, at=time.monotonic())

    @staticmethod
    def read(folder: Path, rank: int) -> _Report:
        """Read the files that a rank wrote."""
        report, path = _Report(), folder / f"output {rank}"
        with suppress(OSError, EOFError, pickle.UnpicklingError):  # the rank was killed, perhaps while writing
            report = pickle.loads((folder / f"report {rank}").read_bytes())
        text = path.read_text(errors="replace") if path.exists() else ""
        return replace(report, output=_EXTENSION_MODULES.sub("", text).strip())


# ------------------------------------------------------------------------------------------------------ on a rank


def _do_in_turn(
    world: World, work: Sequence[tuple[str, Callable[..., Any], tuple[Any, ...]]], folder: Path, limit_s: float
) -> None:
    rank = detect(os.environ).rank
    for name, function, arguments in work:
        report = folder / name / f"report {rank}"
        with _output_to(folder / name / f"output {rank}"):
            # This works without the GIL, and while the main thread waits in a library.
            faulthandler.dump_traceback_later(limit_s, exit=True)
            try:
                returned = function(replace(world, folder=folder / name / "shared"), *arguments)
                report.write_bytes(pickle.dumps(_Report(True, returned)))
            except BaseException as error:
                report.write_bytes(pickle.dumps(_Report.of(error)))
                raise
    faulthandler.dump_traceback_later(limit_s, exit=True)  # for the end of the process


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Redirect the output of this process to a file, including the output of libraries."""
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


def _explained(reports: Sequence[_Report], ended: str) -> str:
    """Return what went wrong: the first error with its traceback, the others in one line each, and the output."""
    by_time = sorted((rank for rank, report in enumerate(reports) if report.error), key=lambda rank: reports[rank].at)
    lines = [f"rank {rank}: {reports[rank].error if i else reports[rank].trace}" for i, rank in enumerate(by_time)]
    lines = lines or [ended or "some ranks did not finish it"]
    for rank, report in enumerate(reports):
        if report.output:
            lines.append(f"---- output of rank {rank} ----\n{report.output[-_SHOWN_CHARACTERS:]}")
    return "\n".join(lines)


def _title(world: World, duty: Duty) -> str:
    return f"{world} fails the duty: {duty.demand}"


def _judged(world: World, duty: Duty, reports: Sequence[_Report], ended: str) -> Failure | None:
    """Return why a duty failed, or None if it passed."""
    title = _title(world, duty)
    if duty.ending is not None:
        if not ended:
            return Failure(title, "The job did not end with an error.")
        said = f"{ended}\n{_explained(reports, ended)}"
        if re.search(duty.ending, said):
            return None
        return Failure(title, f"The job ended, but without a message that matches {duty.ending!r}:\n{said}")
    if not all(report.is_done for report in reports):
        error = next((report.error for report in reports if report.error), "")
        # Assertions of different duties differ, even if their messages are the same.
        return Failure(title, _explained(reports, ended), "" if error.startswith("AssertionError") else error)
    if duty.judge is not None:
        try:
            duty.judge(world, *duty.arguments, [report.returned for report in reports])
        except AssertionError as error:
            return Failure(title, str(error))
        except Exception:
            return Failure(title, f"the results of the ranks could not be judged: {traceback.format_exc()}")
    return None
