"""The commands of the page on SLURM, run in a real SLURM as they stand there, with fewer processes and less time."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from batch import (
    ENDS_S,
    PAGE,
    Job,
    alone,
    assert_requeued_itself,
    cluster,
    environ,
    from_page,
    slow_at_first,
)
from harness import assert_same_training
from page_blocks import blocks
from slurm import Slurm

__all__ = ["alone", "cluster"]  # fixtures

SCRIPT, ALLOCATION, ARRAY = "#!/bin/bash", "salloc ", "--array"
IN_A_JOB = {"two at once": ("--exact", "runs/a runs/b"), "torchrun": ("torchrun", "one")}
GROUPS = " : "


def test_every_command_of_the_page_is_run() -> None:
    run = [SCRIPT, ALLOCATION, ARRAY, GROUPS, *(fragment for fragment, _ in IN_A_JOB.values())]
    found = [block.text for block in blocks(PAGE) if block.language == "bash"]
    assert [sum(fragment in text for fragment in run) for text in found] == [1] * len(run)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.launcher
@pytest.mark.xdist_group("slurm")
def test_the_batch_script(cluster: Slurm, tmp_path: Path, alone: Path) -> None:
    """The signal comes within a minute of 30 s, and the second start may take longer. There are no GPUs."""
    script = from_page(SCRIPT).replace("--time=24:00:00", "--time=2").replace("USR1@120", "USR1@60")
    script = re.sub(r"#SBATCH --gpus-per-node=\d+\n", "", script)
    job = Job.submit(cluster, tmp_path, script=script, more=slow_at_first(tmp_path), trains_in="one")
    job.is_requeued(1)
    job.ends_well(alone)
    assert_requeued_itself(job)
    assert job.sizes == [4, 4]


@pytest.mark.soak
@pytest.mark.launcher
@pytest.mark.xdist_group("slurm")
@pytest.mark.parametrize("command", [ALLOCATION, GROUPS])
def test_a_command_that_makes_a_job(cluster: Slurm, tmp_path: Path, alone: Path, command: str) -> None:
    run(cluster, tmp_path, from_page(command))
    assert_same_training(tmp_path / "one", alone)


@pytest.mark.soak
@pytest.mark.launcher
@pytest.mark.xdist_group("slurm")
@pytest.mark.parametrize("name", IN_A_JOB)
def test_commands_in_an_allocation(cluster: Slurm, tmp_path: Path, alone: Path, name: str) -> None:
    fragment, folders = IN_A_JOB[name]
    run(cluster, tmp_path, from_page(fragment), "salloc", "--nodes", "2", "--ntasks-per-node", "2")
    for folder in folders.split():
        assert_same_training(tmp_path / folder, alone)


def run(slurm: Slurm, folder: Path, text: str, *within: str) -> None:
    (folder / "runs").mkdir()
    done = subprocess.run(
        [*within, "bash", "-euc", text], cwd=folder, env={**environ(slurm), "TESTS_PAUSE": "0"},
        capture_output=True, text=True, timeout=ENDS_S,
    )  # fmt: skip
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
