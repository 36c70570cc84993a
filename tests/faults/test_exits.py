"""How jobs start and end: nobody waits for a rank that has left, and nobody stays when the work is done."""

from __future__ import annotations

import itertools
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from harness import (
    EVERY,
    FORKED,
    HEARTBEAT_S,
    HOROVODRUN,
    MPIRUN,
    MPIRUN_DDP,
    PLAIN,
    TIMEOUT_S,
    TORCHRUN,
    World,
    notes,
    run,
    when_step,
    worlds,
)  # fmt: skip
from places import TESTS

pytestmark = [pytest.mark.launcher, pytest.mark.xdist_group("faults")]
LEAVES_FIRST = TESTS / "faults" / "programs" / "leaves_first.py"
UNITRAIN_RUN = (sys.executable, "-m", "unitrain.commands.cli", "run", "--")
# What a launcher takes to end, and a busy machine to schedule all of that; to import torch, too.
SLACK_S, IMPORT_S = 20.0, 40.0
STEPS = 8


@worlds(soak=EVERY[1:])
def test_leaving_before_the_others_have_started(world: World, tmp_path: Path) -> None:
    """mpirun takes a rank that exits with 0 for one that is done, and MPI_Init waits for it for ever."""
    end = run(world, tmp_path, steps=STEPS, fault="exit:1:start", program=LEAVES_FIRST)
    end.assert_failed_within(IMPORT_S + HEARTBEAT_S + SLACK_S)
    assert re.match(r"rank 1 has ended before it joined the job, maybe with exit code 0", end.said(0))


@worlds(later=[TORCHRUN, HOROVODRUN], soak=[PLAIN, MPIRUN, MPIRUN_DDP])
def test_being_stopped_while_the_others_wait_for_it_to_join(world: World, tmp_path: Path) -> None:
    end = run(world, tmp_path, steps=STEPS, fault="stop:1:init")
    end.assert_failed_within(HEARTBEAT_S + SLACK_S)
    assert re.match(r"rank 1 \(pid \d+\) was stopped for \d+ s before it joined the job", end.said(0))


@worlds(later=[TORCHRUN, HOROVODRUN])
def test_not_coming_in_time(world: World, tmp_path: Path) -> None:
    """Horovod's gloo would abort the process with a C++ exception."""
    end = run(world, tmp_path, steps=STEPS, fault="spin:1:init")
    end.assert_failed_within(1.5 * TIMEOUT_S + SLACK_S)
    assert re.search(r"Not in unitrain\.init on this host: rank 1 \(pid \d+, running\)\.", end.job.output)
    assert "IoException" not in end.job.output


@worlds(soak=EVERY)
def test_leaving_while_the_others_wait_for_it_to_join(world: World, tmp_path: Path) -> None:
    end = run(world, tmp_path, steps=STEPS, fault="exit:1:init")
    end.assert_failed_within(HEARTBEAT_S + SLACK_S)
    if world.launcher != "mpirun":  # which reports it itself, once another rank has called MPI_Init
        assert re.match(r"rank 1 has ended before it joined the job", end.said(0))


@worlds(FORKED, soak=EVERY)
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        pytest.param("thread", "threads that are not daemons: uploader", marks=pytest.mark.soak),
        ("exit-handler", "an exit handler, or the reader of its"),
    ],
)
def test_a_process_that_does_not_exit(world: World, kind: str, reason: str, tmp_path: Path) -> None:
    end = run(world, tmp_path, steps=STEPS, fault=f"{kind}:1:close")
    end.assert_failed_within(TIMEOUT_S + SLACK_S)
    ending = f"it did not exit within {TIMEOUT_S:g} s (timeout_s): it waits for {reason}"
    assert end.said(1).startswith(ending)
    assert max(note["step"] for note in notes(tmp_path)) == STEPS - 1


@worlds(FORKED, soak=EVERY)
@pytest.mark.parametrize(
    "output",
    [">&- 2>&-", *(pytest.param(one, marks=pytest.mark.soak) for one in (">/dev/full 2>&1", "2>&1 | head -1"))],
)
def test_a_failure_that_can_t_be_reported(world: World, output: str, tmp_path: Path) -> None:
    end = run(world, tmp_path, steps=STEPS, fault="kill:1:5", output=f"{output}; exit ${{PIPESTATUS[0]}}")
    end.assert_failed_within(SLACK_S)


@worlds(FORKED)
def test_a_stop_that_can_t_be_reported(world: World, tmp_path: Path) -> None:
    end = run(world, tmp_path, fault="term:1:7", output=">/dev/full")
    assert end.job.code == 143, end.job.output


@worlds(FORKED, soak=EVERY)
def test_a_clock_that_is_set_disturbs_nothing(world: World, tmp_path: Path) -> None:
    end = run(world, tmp_path, steps=STEPS, fault="clock:1:3")
    assert end.job.code == 0, end.job.output
    assert "stopped because" not in end.job.output


# ------------------------------------------------------------------------------------------------------ again and again

ENDINGS: list[dict[str, Any]] = [
    {},
    {"fault": "exit:1:start", "program": LEAVES_FIRST},
    {"fault": "exit:0:init"},
    {"fault": "exit:1:5"},
    {"fault": "exit-handler:0:close"},
    {"fault": "stop:1:5"},
    {"fault": "kill:1:5", "output": ">/dev/full 2>&1"},
    {"output": ">&- 2>&-"},
    {"fault": "clock:1:3"},
    {"stopped_by": signal.SIGHUP},
    {"stopped_by": signal.SIGTERM},
]
GOOD = (ENDINGS[0], ENDINGS[7], ENDINGS[8])


def ends(world: World, folder: Path, fault: str = "none:0:0", stopped_by: int | None = None, **settings: Any) -> bool:
    """Run a job, or stop its ``unitrain run``, and return whether it ended well."""
    if stopped_by is None:
        return run(world, folder, steps=STEPS, fault=fault, **settings).job.code == 0
    stop = when_step(folder, 3, lambda process: process.send_signal(stopped_by))
    return run(world, folder, pause=0.2, under=UNITRAIN_RUN, meanwhile=stop).job.code == 0


@pytest.mark.timeout(3600)
@worlds(soak=EVERY)
def test_a_hundred_starts_and_ends(world: World, tmp_path: Path) -> None:
    """Each leaves no process, which ``run`` checks, and has an exit code that says whether it was a failure."""
    for number, ending in zip(range(100), itertools.cycle(ENDINGS), strict=False):
        folder = tmp_path / str(number)
        folder.mkdir()
        began = time.monotonic()
        assert ends(world, folder, **ending) == (ending in GOOD), f"run {number}: {ending}"
        assert time.monotonic() - began < 60
