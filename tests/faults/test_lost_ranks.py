"""A rank that fails costs at most one step with a copy in memory after each step: another start goes on from it."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from harness import (
    COPIED,
    EVERY,
    FORKED,
    FORKED_HOROVOD,
    HOROVODRUN,
    MPIRUN,
    MPIRUN_DDP,
    ONE,
    PLAIN,
    TORCHRUN,
    Kills,
    World,
    assert_same_training,
    note,
    run,
    saved,
    worlds,
)  # fmt: skip

pytestmark = [pytest.mark.launcher, pytest.mark.xdist_group("faults")]


def steps_made(folder: Path, part: int) -> int:
    """Return after which step the part of a run that began after step ``part`` made its last one, on any rank."""
    made = (file.read_text().splitlines() for file in folder.glob(f"{part}.*.notes"))
    return max(int(json.loads(line)["step"]) for lines in made for line in lines if line.endswith("}"))


def assert_goes_on(world: World, folder: Path, alone: Path, ranks: int) -> None:
    """Assert that another start loses at most one step and gives the same weights."""
    last = steps_made(folder, 0)
    end = run(world, folder, ranks=ranks, environ=COPIED)
    assert end.job.code == 0, end.job.output
    began = int(re.findall(r"began after step (\d+)", end.job.output)[0])
    assert began >= last, f"step {last + 1} was begun, so those before it were copied"
    assert re.search(rf"resumed after step {began}, from \S+, in the memory of ", end.job.output)
    assert_same_training(folder, alone)


@worlds(FORKED, later=[TORCHRUN], soak=[PLAIN, MPIRUN_DDP, HOROVODRUN])
def test_a_killed_rank_costs_at_most_one_step(world: World, kills: Kills, alone: Path) -> None:
    end, folder = kills(world)
    assert end.job.code != 0
    assert saved(folder)[-1] == "step-0000000005"
    assert_goes_on(FORKED, folder, alone, ranks=2)


@worlds(FORKED_HOROVOD, later=[MPIRUN])
def test_on_another_number_of_ranks(world: World, kills: Kills, alone: Path) -> None:
    _, folder = kills(world)
    assert_goes_on(ONE, folder, alone, ranks=1)


@worlds(soak=EVERY)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["kill", "raise", "segfault", "stop"])
def test_any_failure_of_any_rank(world: World, ranks: int, kind: str, tmp_path: Path, alone: Path) -> None:
    drawn = random.Random(f"{world} {ranks} {kind}")
    rank, step = drawn.randrange(ranks), drawn.choice([7, 8, 9, 12, 13, 14])
    end = run(world, tmp_path, fault=f"{kind}:{rank}:{step}", ranks=ranks, environ=COPIED)
    assert end.job.code != 0
    assert_goes_on(world, tmp_path, alone, ranks=ranks)
    note(failure=kind, world=str(world), ranks=ranks, rank=rank, step=step)
