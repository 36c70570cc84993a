"""A job that gets SLURM's SIGUSR1 shortly before its time limit saves a checkpoint and requeues itself, once."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from batch import Job
from harness import saved
from slurm import Slurm


@pytest.mark.launcher
@pytest.mark.xdist_group("slurm")
def test_a_task_of_an_array_is_saved_and_requeued_once(slurm: Slurm, tmp_path: Path) -> None:
    """test_slurm_page.py has a job without an array."""
    array = Job.submit(slurm, tmp_path, "--requeue", "-n", "2", "--array=3-3", script="exec srun --overlap TRAIN")
    job = replace(array, number=f"{array.number}_3")
    try:
        job.makes_step(3)
        assert "Restarts=0" in job.shown()
        slurm.call("scancel", "--signal=USR1", job.number)
        job.wait(lambda: "Restarts=1" in job.shown(), "it was not requeued")
        job.wait(lambda: "JobState=RUNNING" not in job.shown(), "it goes on")
        assert "Restarts=1" in job.shown(), "once"
    finally:
        slurm.call("scancel", job.number)
    said = rf"stopped by SIGUSR1 after step (\d+) and saved in (\S+)\. SLURM has requeued job {job.number}\."
    [(step, folder)] = re.findall(said, job.said)
    [*_, newest] = saved(tmp_path)
    assert folder.endswith(newest)
    assert newest == f"step-{int(step):010d}"
