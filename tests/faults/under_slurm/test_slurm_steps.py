"""Several trainings in one allocation of SLURM, one after another and at once, and heterogeneous steps."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest
from batch import ENDS_S, STEPS, Job, alone, cluster, environ, training
from harness import assert_same_training, notes
from slurm import NODES, Slurm

__all__ = ["alone", "cluster"]  # fixtures
pytestmark = [pytest.mark.launcher, pytest.mark.xdist_group("slurm"), pytest.mark.soak, pytest.mark.timeout(900)]


def allocated(slurm: Slurm, script: str, *options: str, pause_s: float = 0.02) -> subprocess.CompletedProcess[str]:
    """Run a shell script in an allocation."""
    return subprocess.run(
        ["salloc", *options, "bash", "-c", script], env={**environ(slurm), "TESTS_PAUSE": str(pause_s)},
        capture_output=True, text=True, timeout=ENDS_S,
    )  # fmt: skip


def ranks(folder: Path) -> int:
    """Return how many ranks have trained in a folder, in its one start."""
    return len(list(folder.glob("0.*.notes")))


def test_steps_of_an_allocation_do_not_meet(cluster: Slurm, tmp_path: Path, alone: Path) -> None:
    a, b, c, d = (tmp_path / name for name in "abcd")
    script = f"""
        srun {training(a)} && srun -n 3 {training(b)}
        export TESTS_PAUSE=0.2
        srun --exact -n 2 {training(c)} & srun --exact -n 2 {training(d)} &
        until ls {c}/*.notes {d}/*.notes; do jobs -r | grep -q srun || exit; sleep 0.1; done 2> /dev/null
        ls {c}/checkpoints {d}/checkpoints | grep {STEPS:010d} || echo "they ran at once"
        wait -n && wait -n
    """
    done = allocated(cluster, script, "-N", "2", "--ntasks-per-node", "2")
    assert done.returncode == 0, done.stderr
    for folder, size in ((a, 4), (b, 3), (c, 2), (d, 2)):
        assert ranks(folder) == size
        assert_same_training(folder, alone)
    assert "they ran at once" in done.stdout


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


def test_groups_of_a_heterogeneous_job_train_together(cluster: Slurm, tmp_path: Path, alone: Path) -> None:
    """The nodes are such that rank 0 is not on the first of the step's list, which SLURM sorts."""
    folders = direct, first, second, both = [tmp_path / name for name in ("direct", "first", "second", "both")]
    groups = ("-n", "2", "-w", NODES[1], ":", "-n", "1", "-w", NODES[0])
    done = subprocess.run(
        ["srun", *groups[:4], *training(direct).split(), *groups[4:], *training(direct).split()],
        env={**environ(cluster), "TESTS_PAUSE": "0"}, capture_output=True, text=True, timeout=ENDS_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    script = f"""
        srun --het-group=0 {training(first)} & srun --het-group=1 {training(second)} & wait -n && wait -n
        srun --het-group=0,1 {training(both)}
    """
    done = allocated(cluster, script, *groups)
    assert done.returncode == 0, done.stderr
    assert [ranks(folder) for folder in folders] == [3, 2, 1, 3]
    for folder in folders:
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
