"""A run that is killed repeatedly, and resumed in another world each time, gives the result of an uninterrupted one."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable
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
    assert_same_training,
    losses,
    note,
    ranks_of,
    run,
    worlds,
)  # fmt: skip

pytestmark = pytest.mark.launcher


@worlds(soak=[HOROVODRUN])
def test_three_ranks_then_two_then_one(world: World, tmp_path: Path, alone: Path) -> None:
    """Ended within epochs; batches that a worker has prefetched do not count as seen."""
    for part, ranks, last, workers in ((world, 3, 13, 0), (TORCHRUN, 2, 21, 1), (ONE, 1, STEPS, 0)):
        end = run(part, tmp_path, steps=last, ranks=ranks, environ={"TESTS_WORKERS": str(workers)})
        assert end.job.code == 0, end.job.output
    assert sorted({int(file.name.split(".")[0]) for file in tmp_path.glob("*.notes")}) == [0, 13, 21]
    assert_same_training(tmp_path, alone)
    assert sum(losses(alone)[-9:]) < 0.7 * sum(losses(alone)[:9]), "a run that learns nothing proves nothing"


@worlds(soak=[HOROVODRUN])
def test_one_rank_then_two_then_three_then_one(world: World, tmp_path: Path, alone: Path) -> None:
    for part, ranks, last in ((ONE, 1, 9), (TORCHRUN, 2, 18), (world, 3, 29)):
        end = run(part, tmp_path, ranks=ranks, fault=f"kill:{ranks - 1}:{last}")
        assert end.job.code != 0
    end = run(ONE, tmp_path, ranks=1)
    assert end.job.code == 0, end.job.output
    assert_same_training(tmp_path, alone)


def killer(folder: Path, drawn: random.Random) -> Callable[[subprocess.Popen[bytes]], None]:
    """Return what kills one rank or more of a job that is about to start, while it starts or while it trains."""
    within_start, moment, began = drawn.random() < 0.2, drawn.uniform(0, 1.6), time.time()

    def trains() -> bool:
        return any(file.stat().st_mtime > began and file.stat().st_size > 0 for file in folder.glob("*.notes"))

    def kill(process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None and not (ranks_of(process) if within_start else trains()):
            time.sleep(0.02)
        time.sleep(moment)
        alive = ranks_of(process)
        for rank in drawn.sample(alive, k=drawn.randint(min(1, len(alive)), len(alive))):
            with suppress(psutil.NoSuchProcess):  # it has ended by itself
                rank.kill()

    return kill


@pytest.mark.timeout(900)
@worlds(soak=[PLAIN, MPIRUN, TORCHRUN, HOROVODRUN])
def test_kills_at_random_moments(world: World, tmp_path: Path, alone: Path) -> None:
    """At moments that no test chose, until it comes to its end: within a start, a step, a save."""
    drawn = random.Random(f"{world}")
    codes: list[int] = []
    while 0 not in codes and len(codes) < 30:
        end = run(world, tmp_path, pause=0.15, meanwhile=killer(tmp_path, drawn))  # its 40 steps take 6 seconds
        codes.append(end.job.code)
    assert codes[-1] == 0, end.job.output
    assert len(codes) > 2, "a run that is not killed proves nothing"
    assert_same_training(tmp_path, alone)
    note(world=str(world), kills=len(codes) - 1)
