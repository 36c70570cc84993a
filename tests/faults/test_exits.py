"""How jobs start and end: nobody waits for a rank that has left, and nobody stays when the work is done."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import (
    EVERY,
    FORKED,
    HEARTBEAT_S,
    TIMEOUT_S,
    World,
    notes,
    run,
    worlds,
)  # fmt: skip
from places import TESTS

pytestmark = [pytest.mark.launcher, pytest.mark.xdist_group("faults")]
LEAVES_FIRST = TESTS / "faults" / "programs" / "leaves_first.py"
# What a launcher takes to end, and a busy machine to schedule all of that; to import torch, too.
SLACK_S, IMPORT_S = 20.0, 40.0
STEPS = 8


@worlds(soak=EVERY[1:])
def test_leaving_before_the_others_have_started(world: World, tmp_path: Path) -> None:
    """mpirun takes a rank that exits with 0 for one that is done, and MPI_Init waits for it for ever."""
    end = run(world, tmp_path, steps=STEPS, fault="exit:1:start", program=LEAVES_FIRST)
    end.assert_failed_within(IMPORT_S + HEARTBEAT_S + SLACK_S)
    assert re.match(r"rank 1 has ended before it joined the job, maybe with exit code 0", end.said(0))


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
    assert f"has not exited {HEARTBEAT_S:.0f} s after the end of its script: it waits for {reason}" in end.job.output
    assert end.said(1).startswith(f"it did not exit within {TIMEOUT_S:g} s: {reason}")
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
