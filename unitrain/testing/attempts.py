"""Runs duties on the ranks of a world, one after another, and judges the result of each."""

from __future__ import annotations

import faulthandler
import os
import pickle
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from unitrain.launch.detect import detect
from unitrain.testing.duty import Duty
from unitrain.testing.worlds import World

LIMIT_S = 60.0
"""Time limit of one duty, in seconds. Most take a tenth of a second."""
_SHOWN_CHARACTERS = 60_000  # a crash prints the stacks of all threads

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
            (folder / duty.name).mkdir()
        work = [(duty.name, duty.function, duty.arguments) for duty in duties]
        ended, printed = "", StringIO()
        try:
            with redirect_stdout(printed):
                # One limit more, for starting and ending the processes.
                world.run(_do_in_turn, world, work, folder, limit_s, timeout=limit_s * (len(work) + 1))
        except (Exception, pytest.fail.Exception, SystemExit) as error:
            # The cause has the traceback of the rank.
            ended = f"{error.__cause__ or ''}\n{type(error).__name__}: {error}".strip()
        said = f"{ended}\n{printed.getvalue().strip()[-_SHOWN_CHARACTERS:]}"
        for duty in duties:
            results = [folder / duty.name / f"result {rank}" for rank in range(world.processes)]
            is_done = all(result.exists() for result in results)
            problem = said
            if duty.ending is not None:
                problem = _problem_of_ending(duty.ending, ended, said)
            elif is_done:
                problem = _judged(world, duty, results)
                # The last one is blamed: it is the latest that can have done harm.
                if ended and duty is duties[-1]:
                    problem = f"all duties passed, but then the processes failed: {said}"
            outcomes[world, duty.name] = problem and f"{world} fails the duty: {duty.demand}\n{problem}"
            if not is_done:
                return


def _do_in_turn(
    world: World, work: Sequence[tuple[str, Callable[..., Any], tuple[Any, ...]]], folder: Path, limit_s: float
) -> None:
    """Run the duties on this rank up to the first error, and write the result of each to a file."""
    rank = detect(os.environ).rank
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # C++'s, too
    for name, function, arguments in work:
        print(f"---- {name}", flush=True)
        # This works without the GIL, and while the main thread waits in a library.
        faulthandler.dump_traceback_later(limit_s, exit=True)
        returned = function(world, *arguments)
        draft = folder / name / f"draft {rank}"
        draft.write_bytes(pickle.dumps(returned))
        draft.rename(folder / name / f"result {rank}")
    faulthandler.dump_traceback_later(limit_s, exit=True)  # for the end of the process


def _problem_of_ending(pattern: str, ended: str, said: str) -> str:
    """Return why a duty that must end the job failed, or an empty string if it passed."""
    if not ended:
        return "The job did not end with an error."
    # The reason may be in the error, in a traceback, or in what a dying rank has printed.
    return "" if re.search(pattern, said) else f"The job ended, but without a message that matches {pattern!r}:\n{said}"


def _judged(world: World, duty: Duty, results: Sequence[Path]) -> str:
    """Return what is wrong with the results of the ranks, or an empty string."""
    if duty.judge is None:
        return ""
    try:
        duty.judge(world, *duty.arguments, [pickle.loads(result.read_bytes()) for result in results])
    except AssertionError as error:
        return str(error)
    return ""
