"""Runs duties on the ranks of a world, one after another, and judges the result of each."""

from __future__ import annotations

import faulthandler
import os
import pickle
import re
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch

from unitrain.job.excepthook import summary
from unitrain.launch.detect import detect
from unitrain.testing.duty import Duty
from unitrain.testing.worlds import World

LIMIT_S = 60.0
"""Time limit of one duty, in seconds. Most take a tenth of a second."""
_SHOWN_CHARACTERS = 60_000  # a crash prints the stacks of all threads
# The last line that Python prints when a process crashes. It is long, and no help.
_EXTENSION_MODULES = re.compile(r"^Extension modules: .*\(total: \d+\)$", re.MULTILINE)

Outcomes = dict[tuple[World, str], str]
"""Why each duty of each world that was run failed, in order; an empty string if it passed."""


def try_duties(world: World, duties: Sequence[Duty], outcomes: Outcomes, limit_s: float = LIMIT_S) -> None:
    """Start the ranks of a world once, run duties on them in turn, up to the first that fails, and add the outcomes.

    Args:
        world: the world to start.
        duties: the duties, in order. One with an ``ending`` must be the only one.
        outcomes: gets an entry for each duty that was run.
        limit_s: seconds that each duty may take.
    """
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for duty in duties:
            # Here, and not on the ranks: one could use it before another has made it.
            (folder / duty.name / "shared").mkdir(parents=True)
        work = [(duty.name, duty.function, duty.arguments) for duty in duties]
        ended, printed = "", StringIO()
        try:
            with redirect_stdout(printed):
                # One limit more, for starting and ending the processes.
                world.run(_do_in_turn, world, work, folder, limit_s, timeout=limit_s * (len(work) + 1))
        except (KeyboardInterrupt, pytest.exit.Exception):
            raise
        except BaseException as error:  # including pytest's failures and SystemExit
            ended = "".join(traceback.format_exception_only(error)).strip()
        output = _EXTENSION_MODULES.sub("", printed.getvalue()).strip()[-_SHOWN_CHARACTERS:]
        for duty in duties:
            reports = [_Report.read(folder / duty.name / f"report {rank}") for rank in range(world.processes)]
            problem = _problem(world, duty, reports, ended, output)
            is_done = all(report.is_done for report in reports)
            # The last one is blamed: it is the latest that can have done harm.
            if ended and is_done and duty is duties[-1] and not duty.ending:
                problem = f"all duties passed, but then the processes failed: {ended}"
            outcomes[world, duty.name] = problem and f"{world} fails the duty: {duty.demand}\n{problem}"
            if not is_done:
                return


class _Report(NamedTuple):
    """The result of a duty on one rank. The default stands for a rank that has not finished the duty.

    Attributes:
        returned: the result of its function, which can be pickled.
    """

    is_done: bool = False
    """Whether the rank has finished the duty without an error."""
    returned: Any = None
    error: str = ""
    """The error in one line, or an empty string."""
    trace: str = ""
    """The error with its traceback."""
    at: float = 0.0
    """Time of the error, on the monotonic clock, which all processes of a host share."""

    @staticmethod
    def read(path: Path) -> _Report:
        """Read the file that a rank wrote; the default if it is missing or incomplete."""
        try:
            report: _Report = pickle.loads(path.read_bytes())
        except (OSError, EOFError, pickle.UnpicklingError):  # the rank was killed, perhaps while writing
            report = _Report()
        return report


# ------------------------------------------------------------------------------------------------------ on a rank


def _do_in_turn(
    world: World, work: Sequence[tuple[str, Callable[..., Any], tuple[Any, ...]]], folder: Path, limit_s: float
) -> None:
    """Run the duties on this rank, and write a report of each. Runs on every rank, up to the first error."""
    rank = detect(os.environ).rank
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # C++'s, too
    for name, function, arguments in work:
        report = folder / name / f"report {rank}"
        print(f"---- {name}", flush=True)
        # This works without the GIL, and while the main thread waits in a library.
        faulthandler.dump_traceback_later(limit_s, exit=True)
        try:
            returned = function(replace(world, folder=folder / name / "shared"), *arguments)
            report.write_bytes(pickle.dumps(_Report(True, returned)))
        except BaseException as error:
            failed = _Report(error=summary(error), trace=traceback.format_exc().strip(), at=time.monotonic())
            report.write_bytes(pickle.dumps(failed))
            raise
    faulthandler.dump_traceback_later(limit_s, exit=True)  # for the end of the process


# --------------------------------------------------------------------------------------------- outside of the ranks


def _explained(reports: Sequence[_Report], ended: str, output: str) -> str:
    """Return an explanation: the first error with its traceback, the others in one line each, and the output.

    Args:
        reports: by rank.
        ended: the error with which the job ended; an empty string if it had none.
        output: what the ranks have printed.
    """
    by_time = sorted((rank for rank, report in enumerate(reports) if report.error), key=lambda rank: reports[rank].at)
    lines = [f"rank {rank}: {reports[rank].error if i else reports[rank].trace}" for i, rank in enumerate(by_time)]
    return "\n".join([*(lines or [ended or "some ranks did not finish it"]), output])


def _problem(world: World, duty: Duty, reports: Sequence[_Report], ended: str, output: str) -> str:
    """Return why a duty failed, or an empty string if it passed. The arguments are as in ``_explained``."""
    if duty.ending is not None:
        said = f"{ended}\n{_explained(reports, ended, output)}"
        if not ended:
            return "The job did not end with an error."
        # The reason may be in the error, in a traceback, or in what a dying rank has printed.
        missing = f"The job ended, but without a message that matches {duty.ending!r}:\n{said}"
        return "" if re.search(duty.ending, said) else missing
    if not all(report.is_done for report in reports):
        return _explained(reports, ended, output)
    if duty.judge is not None:
        try:
            duty.judge(world, *duty.arguments, [report.returned for report in reports])
        except AssertionError as error:
            return str(error)
        except Exception:
            return f"the results of the ranks could not be judged: {traceback.format_exc()}"
    return ""
