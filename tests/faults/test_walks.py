"""Random walks: one run under many launchers, backends and numbers of ranks, ended in another way each time."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from harness import (
    FORKED,
    HOROVODRUN,
    MPIRUN,
    MPIRUN_DDP,
    ONE,
    TORCHRUN,
    World,
    assert_same_training,
    note,
    notes,
    ranks_of,
    run,
    train_alone,
)  # fmt: skip

pytestmark = [pytest.mark.launcher, pytest.mark.soak, pytest.mark.timeout(1800)]

WALKS, FEWEST_ENDS = 5, 10
DISTURBED, STEPS = 60, 66  # the last steps are made in peace
MOST_STEPS_A_START, PAUSE_S, MOST_STARTS = 6, 0.15, 60
FSDP, FORKED_FSDP = World("torchrun", "fsdp"), World("forked", "fsdp")
WORLDS = [one for one in (FORKED, TORCHRUN, MPIRUN, MPIRUN_DDP, HOROVODRUN, FSDP, FORKED_FSDP) if not one.missing]
FILLER = "filler"


class Disturbed(NamedTuple):
    """A job that a disturbance ends."""

    process: subprocess.Popen[bytes]
    ranks: list[psutil.Process]
    folder: Path
    drawn: random.Random


Disturb = Callable[[Disturbed], None]


def kill(*ranks: psutil.Process) -> None:
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.kill()


def kill_ranks(job: Disturbed) -> None:
    kill(*job.drawn.sample(job.ranks, k=job.drawn.randint(1, len(job.ranks))))


def terminate_a_rank(job: Disturbed) -> None:
    with suppress(psutil.NoSuchProcess):
        job.drawn.choice(job.ranks).terminate()


def freeze_a_rank_for_a_while(job: Disturbed) -> None:
    """It is not missed, and trains on. Then it is killed."""
    rank = job.drawn.choice(job.ranks)
    with suppress(psutil.NoSuchProcess):
        rank.suspend()
        time.sleep(1)
        rank.resume()
        time.sleep(0.5)
        rank.kill()


def kill_the_launcher(job: Disturbed) -> None:
    """The ranks train on for a while, until the cluster removes them."""
    job.process.kill()
    time.sleep(job.drawn.uniform(0, 1.5))
    kill_ranks(job)
    time.sleep(0.5)
    kill(*job.ranks)


def fill_the_disk(job: Disturbed) -> None:
    """The next checkpoint can't be written, which ends the job."""
    with suppress(OSError), (job.folder / "checkpoints" / FILLER).open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))


ENDS = (kill_ranks, kill_ranks, terminate_a_rank, freeze_a_rank_for_a_while, kill_the_launcher, fill_the_disk)


def ending(folder: Path, disturb: Disturb, drawn: random.Random) -> Callable[[subprocess.Popen[bytes]], None]:
    """Return what ends a job that is about to start, after some steps, or while it starts."""
    before, steps = last_step(folder), drawn.randint(0, MOST_STEPS_A_START)
    moment = drawn.uniform(0, 0.3)

    def act(process: subprocess.Popen[bytes]) -> None:
        began = time.monotonic()
        while process.poll() is None and (not ranks_of(process) or last_step(folder) < before + steps):
            if not steps and time.monotonic() - began > 5:  # while it starts
                break
            time.sleep(0.02)
        time.sleep(moment)
        ranks = ranks_of(process)
        if ranks:
            disturb(Disturbed(process, ranks, folder, drawn))

    return act


def last_step(folder: Path) -> int:
    return max((note["step"] for note in notes(folder)), default=-1)


def forget_what_was_lost(folder: Path, began: float) -> None:
    """Remove the notes of an earlier start from the same step, whose other ranks have no new ones."""
    files = {file: file.stat().st_mtime for file in folder.glob("*.notes")}
    again = {file.name.split(".")[0] for file, written in files.items() if written >= began}
    for file, written in files.items():
        if written < began and file.name.split(".")[0] in again:
            file.unlink()


@pytest.fixture(scope="module")
def peaceful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an undisturbed run on one process."""
    return train_alone(tmp_path_factory, STEPS)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder whose checkpoints are on a disk of their own, if the test may mount one."""
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    mounts = os.geteuid() == 0 and shutil.which("mount") is not None
    if mounts:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(checkpoints)], check=True)
    yield tmp_path
    if mounts:
        subprocess.run(["umount", str(checkpoints)], check=True)


@pytest.mark.parametrize("walk", range(WALKS))
def test_a_walk_ends_where_an_undisturbed_run_does(walk: int, small_disk: Path, peaceful: Path) -> None:
    drawn = random.Random(f"walk {walk}")
    ends = ENDS if (small_disk / "checkpoints").is_mount() else tuple(one for one in ENDS if one is not fill_the_disk)
    path: list[str] = []
    output = ""
    for _ in range(MOST_STARTS):
        ranks = drawn.randint(1, 4)
        world = ONE if ranks == 1 else drawn.choice(WORLDS)
        sharded = ranks > 1 and world.backend != "fsdp" and drawn.random() < 0.4
        disturb = drawn.choice(ends)
        path.append(f"{world} {ranks}{' ZeRO-1' if sharded else ''} {disturb.__name__} from {last_step(small_disk)}")
        began = time.time()
        end = run(
            world,
            small_disk,
            steps=DISTURBED,
            ranks=ranks,
            pause=PAUSE_S,
            environ={"UNITRAIN_SHARD_OPTIMIZER": "true"} if sharded else None,
            meanwhile=ending(small_disk, disturb, drawn),
        )
        (small_disk / "checkpoints" / FILLER).unlink(missing_ok=True)
        forget_what_was_lost(small_disk, began)
        output += f"\n==== {path[-1]}\n{end.job.output}"
        if end.job.code == 0 and last_step(small_disk) == DISTURBED - 1:
            break
    last = run(ONE, small_disk, steps=STEPS, ranks=1)
    assert last.job.code == 0, output + last.job.output
    assert len(path) > FEWEST_ENDS, f"a walk that is hardly disturbed proves nothing: {path}"
    try:
        assert_same_training(small_disk, peaceful)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{output}") from error
    note(walk=walk, starts=len(path) + 1)
