"""What a kill costs where a survivor can't save the last step: the steps since the last copy in memory."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from harness import (
    HOROVODRUN,
    MPIRUN,
    MPIRUN_DDP,
    TORCHRUN,
    World,
    assert_same_training,
    ranks_of,
    run,
    when_step,
    worlds,
)  # fmt: skip

pytestmark = [pytest.mark.launcher, pytest.mark.soak, pytest.mark.xdist_group("slurm")]

EVERY = 3
FSDP, FSDP_MPI, SRUN = World("torchrun", "fsdp"), World("mpirun", "fsdp"), World("srun", "fsdp")
UNITRAIN_RUN = ["unitrain", "run", "--max-restarts", "2", "--"]
ZERO = {"UNITRAIN_SHARD_OPTIMIZER": "true"}


@pytest.fixture
def environ(tmp_path: Path, slurm_environ: dict[str, str]) -> Iterator[dict[str, str]]:
    memory = tmp_path / "memory"
    yield {"UNITRAIN_MEMORY_COPIES__EVERY": str(EVERY), "UNITRAIN_MEMORY_COPIES__FOLDER": str(memory), **slurm_environ}
    assert not list(memory.iterdir()), "a clean end removes the copies"


def more(world: World) -> dict[str, str]:
    """Return the settings with which no survivor has all of the state."""
    return {} if world.backend == "fsdp" else ZERO


def assert_goes_on(world: World, folder: Path, alone: Path, environ: dict[str, str]) -> None:
    end = run(world, folder, environ=environ)
    assert end.job.code == 0, end.job.output
    assert re.search(r"resumed after step 6, from .* in the memory of \S+: 1 steps after", end.job.output)
    assert_same_training(folder, alone)


@worlds(FSDP, TORCHRUN, FSDP_MPI, MPIRUN_DDP, MPIRUN, HOROVODRUN, SRUN)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank(world: World, rank: int, tmp_path: Path, alone: Path, environ: dict[str, str]) -> None:
    end = run(world, tmp_path, fault=f"kill:{rank}:8", environ={**environ, **more(world)}, pause=0.1)
    assert end.job.code != 0
    assert_goes_on(world, tmp_path, alone, {**environ, **more(world)})


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a launcher and all that it has started at once."""
    for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            one.kill()


@worlds(FSDP, TORCHRUN, FSDP_MPI, MPIRUN, HOROVODRUN)
def test_a_launcher_is_killed_with_all_ranks(
    world: World, tmp_path: Path, alone: Path, environ: dict[str, str]
) -> None:
    settings = {**environ, **more(world)}
    run(world, tmp_path, environ=settings, pause=0.3, meanwhile=when_step(tmp_path, 7, kill_all))
    assert_goes_on(world, tmp_path, alone, settings)


@worlds(FSDP, MPIRUN)
def test_started_again_by_unitrain_run(world: World, tmp_path: Path, alone: Path, environ: dict[str, str]) -> None:
    kill = when_step(tmp_path, 7, lambda process: ranks_of(process)[0].kill())
    end = run(world, tmp_path, environ={**environ, **more(world)}, pause=0.3, under=UNITRAIN_RUN, meanwhile=kill)
    assert end.job.code == 0, end.job.output
    assert "resumed after step 6" in end.job.output
    assert_same_training(tmp_path, alone)
