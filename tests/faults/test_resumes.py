"""A run that is killed again and again, and goes on elsewhere each time, is the run to which nothing happened."""

from __future__ import annotations

import random
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from harness import (
    HOROVODRUN,
    MPIRUN,
    ONE,
    PLAIN,
    STEPS,
    TORCHRUN,
    World,
    alone,
    assert_same_training,
    losses,
    ranks_of,
    run,
    worlds,
)  # fmt: skip

__all__ = ["alone"]  # the fixture
pytestmark = pytest.mark.launcher


@worlds(HOROVODRUN)
def test_three_ranks_then_two_then_one(world: World, tmp_path: Path, alone: Path) -> None:
    """Ended within epochs; batches that a worker has prefetched do not count as seen."""
    for part, ranks, last, workers in ((world, 3, 13, 0), (TORCHRUN, 2, 21, 1), (ONE, 1, STEPS, 0)):
        end = run(part, tmp_path, steps=last, ranks=ranks, environ={"TESTS_WORKERS": str(workers)})
        assert end.job.code == 0, end.job.output
    assert sorted({int(file.name.split(".")[0]) for file in tmp_path.glob("*.notes")}) == [0, 13, 21]
    assert_same_training(tmp_path, alone)
    assert sum(losses(alone)[-9:]) < 0.7 * sum(losses(alone)[:9]), "a run that learns nothing proves nothing"


@worlds(HOROVODRUN)
def test_one_rank_then_two_then_three_then_one(world: World, tmp_path: Path, alone: Path) -> None:
    for part, ranks, last in ((ONE, 1, 9), (TORCHRUN, 2, 18), (world, 3, 29)):
        end = run(part, tmp_path, ranks=ranks, fault=f"kill:{ranks - 1}:{last}")
        assert end.job.code != 0
    end = run(ONE, tmp_path, ranks=1)
    assert end.job.code == 0, end.job.output
    assert_same_training(tmp_path, alone)


@pytest.mark.timeout(900)
@worlds(soak=[PLAIN, MPIRUN, TORCHRUN, HOROVODRUN])
def test_kills_at_random_moments(world: World, tmp_path: Path, alone: Path) -> None:
    """At moments that no test chose, until it comes to its end: within a start, a step, a save."""
    drawn = random.Random(f"{world}")
    kills = 0
    for _ in range(30):
        moment = drawn.uniform(1, 8)  # of these about 4 are the start, and 40 steps with their pauses another 6

        def kill(process: subprocess.Popen[bytes], moment: float = moment) -> None:
            time.sleep(moment)
            with suppress(psutil.NoSuchProcess):  # it has ended by itself
                alive = ranks_of(process)
                for rank in drawn.sample(alive, k=drawn.randint(min(1, len(alive)), len(alive))):
                    rank.kill()

        end = run(world, tmp_path, pause=0.15, meanwhile=kill)
        if end.job.code == 0:
            break
        kills += 1
    assert end.job.code == 0, end.job.output
    assert kills >= 2, "a run that is not killed proves nothing"
    assert_same_training(tmp_path, alone)
