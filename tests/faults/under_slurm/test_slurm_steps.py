"""Steps of jobs that are requeued: several in one allocation, and those of a heterogeneous job."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from batch import Job, alone, cluster, training
from harness import assert_same_training, notes
from slurm import Slurm

__all__ = ["alone", "cluster"]  # fixtures
pytestmark = [pytest.mark.launcher, pytest.mark.xdist_group("slurm"), pytest.mark.soak, pytest.mark.timeout(900)]


def test_steps_of_a_job_that_is_requeued_are_all_saved(cluster: Slurm, tmp_path: Path, alone: Path) -> None:
    """The step that is first to have saved requeues the job, whereupon SLURM sends the others a SIGTERM."""
    quick, slow = tmp_path / "quick", tmp_path / "slow"
    script = f"""
        srun --exact -n 2 {training(quick)} &
        TESTS_PAUSE=${{SLURM_RESTART_COUNT:-5}} srun --exact -n 2 {training(slow)} & wait -n && wait -n
    """
    job = Job.submit(cluster, tmp_path, "-n", "4", "--requeue", script=script, more={"TESTS_PAUSE": "0.1"})
    job.wait(lambda: notes(quick) and notes(slow), "they did not train")
    time.sleep(1)  # within a pause of the slow one
    cluster.call("scancel", "--signal=USR1", job.number)
    job.is_requeued(1)
    job.wait(lambda: "JobState=COMPLETED" in job.shown(), "it did not end well")
    assert len(re.findall(r"stopped by SIGUSR1 after step \d+ and saved in", job.said)) == 2, job.said
    assert "a second" not in job.said
    assert job.said.count(f"SLURM has requeued job {job.number}.") == 2, job.said
    for folder in (quick, slow):
        assert_same_training(folder, alone)


def test_a_heterogeneous_job_is_requeued_as_a_whole(cluster: Slurm, tmp_path: Path, alone: Path) -> None:
    script = "#!/bin/bash\n#SBATCH -n 2\n#SBATCH hetjob\n#SBATCH -n 1\nsrun --het-group=0,1 TRAIN"
    job = Job.submit(cluster, tmp_path, "--requeue", script=script)
    job.makes_step(5)
    cluster.call("scancel", "--signal=USR1", job.number)
    job.is_requeued(1)
    job.ends_well(alone)
    assert job.sizes == [3, 3]
    assert f"SLURM has requeued job {job.number}." in job.said
