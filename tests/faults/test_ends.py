"""A rank that fails, dies, freezes or exits ends the job soon, under every launcher, and the message names it.

``make test`` has the faults in ranks that are forked, and ``make test-all`` kills one under every launcher.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import (
    EVERY,
    FORKED,
    FORKED_HOROVOD,
    HEARTBEAT_S,
    HOROVODRUN,
    MPIRUN,
    MPIRUN_DDP,
    PLAIN,
    STEPS,
    TIMEOUT_S,
    TORCHRUN,
    Kills,
    World,
    run,
    worlds,
)  # fmt: skip

pytestmark = [pytest.mark.launcher, pytest.mark.xdist_group("faults")]
# What a launcher takes to end, and a busy machine to schedule all of that, many times over.
SLACK_S = 20.0


@worlds(FORKED, FORKED_HOROVOD, later=[TORCHRUN, MPIRUN, HOROVODRUN], soak=[PLAIN, MPIRUN_DDP])
def test_killed(world: World, kills: Kills) -> None:
    end, _ = kills(world)
    end.assert_failed_within(SLACK_S)
    assert re.fullmatch(r"rank 1 on \S+ \(pid \d+\) ended without reporting an error: it was killed, .*", end.said(0))
    assert "Traceback" not in end.job.stderr.split("stopped because")[0]


@worlds(FORKED, soak=EVERY)
@pytest.mark.parametrize(
    "place", ["7", "close", *(pytest.param(place, marks=pytest.mark.soak) for place in ("prepare", "evaluation"))]
)
def test_rank_0_killed(world: World, place: str, tmp_path: Path) -> None:
    """Rank 0 has the hub. In all places but a step, the others wait for it."""
    end = run(world, tmp_path, fault=f"kill:0:{place}", ranks=3, steps=STEPS if place == "7" else 3)
    end.assert_failed_within(SLACK_S)
    said = re.findall(r"rank \d on \S+ \(pid \d+\): stopped because rank 0 on \S+ \(pid \d+\) ended", end.job.output)
    assert said, end.job.output


@worlds(soak=EVERY)
def test_rank_0_killed_before_it_met_the_others(world: World, tmp_path: Path) -> None:
    """Processes that nobody started together learn of it by waiting; a launcher ends them."""
    end = run(world, tmp_path, fault="kill:0:init", ranks=3)
    end.assert_failed_within(TIMEOUT_S + SLACK_S)


@worlds(FORKED, soak=EVERY)
@pytest.mark.parametrize(
    ("kind", "within_s", "said", "shown"),
    [
        ("stop", HEARTBEAT_S, r"sent no heartbeat for \d s; it was in .* after step \d", ""),
        # No thread of the process can say where it is, but the interpreter's handler of fatal signals can.
        ("hold-gil", HEARTBEAT_S, "sent no heartbeat", r"program.py\", line \d+ in <lambda>"),
        ("exit", 3, "finished after step 7", ""),  # a rank that ends with status 0 while the others train
        ("os-exit", 0, "ended without reporting an error", ""),
        pytest.param(
            *("segfault", 0, "ended without reporting an error", "Fatal Python error: Segmentation fault"),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_rank_that_freezes_or_leaves(
    world: World, kind: str, within_s: float, said: str, shown: str, tmp_path: Path
) -> None:
    end = run(world, tmp_path, fault=f"{kind}:1:7")
    end.assert_failed_within(within_s + SLACK_S)
    assert re.match(rf"rank 1 on \S+ \(pid \d+\) {said}", end.said(0))
    assert re.search(shown, end.job.output)


@worlds(FORKED, soak=EVERY)
def test_an_error_of_the_users(world: World, tmp_path: Path) -> None:
    end = run(world, tmp_path, fault="raise:1:7")
    end.assert_failed_within(SLACK_S)
    assert re.match(r"rank 1 on \S+ \(pid \d+\): KeyError: \"A USER'S MISTAKE\"", end.said(0))
    assert len(re.findall(r"unitrain: rank 1 of 2 on .* failed: KeyError: \"A USER'S MISTAKE\"", end.job.output)) == 1
    assert len(re.findall("FAULTS\\[kind\\]\\(\\)", end.job.output)) == 1, "the user's traceback, once"


@worlds(soak=EVERY)
def test_endless_loop(world: World, tmp_path: Path) -> None:
    end = run(world, tmp_path, fault="spin:1:7")
    end.assert_failed_within(TIMEOUT_S + 5 + 2 * SLACK_S)
    assert re.match(r"rank 1 on \S+ \(pid \d+\) did not reach the call that rank 0 waited in", end.said(0))
    assert re.search(r"program.py\", line \d+ in _spin", end.job.output), "the stack of the rank that hangs"


@worlds(FORKED, soak=[PLAIN, TORCHRUN, MPIRUN_DDP])
@pytest.mark.parametrize("call", ["save", pytest.param("barrier", marks=pytest.mark.soak)])
def test_a_collective_that_only_one_calls(world: World, call: str, tmp_path: Path) -> None:
    """The ranks are blocked, but not in the same call: nobody waits for timeout_s."""
    end = run(world, tmp_path, fault=f"{call}:0:7", environ={"UNITRAIN_TIMEOUT_S": "200"})
    end.assert_failed_within(5 + 2 * SLACK_S)
    at = r"after step 7, for \d+ s, at \S+program\.py:\d+"
    said = rf"rank 0 on \S+ \(pid \d+\) is in \S*{call} {at}, and rank 1 is in step {at}: all ranks must make the same"
    assert re.search(said, end.job.output), end.job.output
