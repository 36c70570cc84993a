"""A rank that fails costs at most one step: a survivor saves the last complete one, and the same command goes on."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from harness import (
    HOROVODRUN,
    MPIRUN,
    MPIRUN_DDP,
    ONE,
    PLAIN,
    TORCHRUN,
    World,
    alone,
    assert_same_training,
    note,
    run,
    saved,
    worlds,
)  # fmt: skip

__all__ = ["alone"]  # the fixture
pytestmark = pytest.mark.launcher


def steps_made(folder: Path, part: int) -> int:
    """Return after which step the part of a run that began after step ``part`` made its last one, on any rank."""
    made = (file.read_text().splitlines() for file in folder.glob(f"{part}.*.notes"))
    return max(int(json.loads(line)["step"]) for lines in made for line in lines if line.endswith("}"))


def assert_goes_on(world: World, folder: Path, alone: Path, ranks: int) -> None:
    """Assert that the same command, started again, loses at most one step and gives the same weights."""
    last = steps_made(folder, 0)
    end = run(world, folder, ranks=ranks)
    assert end.job.code == 0, end.job.output
    began = int(re.findall(r"began after step (\d+)", end.job.output)[0])
    assert began >= last, f"step {last} was begun, so those before it were complete"
    assert_same_training(folder, alone)


@worlds(TORCHRUN, soak=[PLAIN, MPIRUN, MPIRUN_DDP, HOROVODRUN])
def test_a_killed_rank_costs_at_most_one_step(world: World, tmp_path: Path, alone: Path) -> None:
    end = run(world, tmp_path, fault="kill:1:8")
    assert end.job.code != 0
    assert re.search(r"unitrain: emergency checkpoint: rank 0 has saved the state after step 8 in ", end.job.output)
    assert saved(tmp_path)[-1] == "step-0000000008"
    assert_goes_on(world, tmp_path, alone, ranks=2)


@worlds(MPIRUN)
def test_under_a_launcher_that_leaves_a_second(world: World, tmp_path: Path, alone: Path) -> None:
    run(world, tmp_path, fault="kill:1:8")
    assert saved(tmp_path)[-1] == "step-0000000008"
    assert_goes_on(ONE, tmp_path, alone, ranks=1)


@worlds(soak=[PLAIN, TORCHRUN, MPIRUN, MPIRUN_DDP, HOROVODRUN])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["raise", "segfault", "stop"])  # test_kills.py kills
def test_any_failure_of_any_rank(world: World, ranks: int, kind: str, tmp_path: Path, alone: Path) -> None:
    drawn = random.Random(f"{world} {ranks} {kind}")
    rank, step = drawn.randrange(ranks), drawn.choice([6, 7, 8, 9, 11, 12, 13, 14])
    end = run(world, tmp_path, fault=f"{kind}:{rank}:{step}", ranks=ranks)
    assert end.job.code != 0
    assert saved(tmp_path)[-1] == f"step-{step:010d}", end.job.output
    assert_goes_on(world, tmp_path, alone, ranks=ranks)
    note(emergency=kind, world=str(world), ranks=ranks, rank=rank, step=step)
