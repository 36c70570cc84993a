"""Jobs of SLURM that lose a node, are preempted, killed or requeued, in a real SLURM (tests/support/hosts/slurm.py)."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from batch import Job, alone, assert_requeued_itself, cluster, slow_at_first
from places import TESTS
from slurm import NODES, Slurm

__all__ = ["alone", "cluster"]  # fixtures
pytestmark = [pytest.mark.launcher, pytest.mark.xdist_group("slurm"), pytest.mark.soak, pytest.mark.timeout(900)]

TRAINS = TESTS / "programs" / "trains.py"
TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2")


ON_WHAT_IS_LEFT = """
cat > step.sh <<'END'
nodes=$(squeue --noheader --jobs $SLURM_JOB_ID --format %N)
count=$(scontrol show hostnames $nodes | wc -l)
exec srun --no-kill --nodes $count --nodelist $nodes --ntasks $((2 * count)) TRAIN
END
exec unitrain run --max-restarts 3 -- bash step.sh
"""


def test_an_allocation_shrinks(cluster: Slurm, tmp_path: Path, alone: Path) -> None:
    job = Job.submit(cluster, tmp_path, *TWO_BY_TWO, "--no-kill", script=ON_WHAT_IS_LEFT)
    job.makes_step(6)  # after the checkpoint of step 5, which is as good as the copy of it
    cluster.lose(NODES[1])
    job.ends_well(alone)
    assert job.sizes == [4, 2]
    assert re.search(r"resumed after step \d+, from .*, in the memory of", job.said)


@pytest.mark.parametrize("lost", NODES)  # the first has the batch script
def test_a_job_is_requeued_when_a_node_fails(cluster: Slurm, tmp_path: Path, alone: Path, lost: str) -> None:
    # With --ntasks-per-node for sbatch, SLURM would wait for two nodes.
    options = ("--nodes=1-2", "--exclusive", "--requeue")
    job = Job.submit(cluster, tmp_path, *options, script="srun --ntasks-per-node 2 TRAIN")
    job.makes_step(5)
    cluster.lose(lost)
    job.is_requeued(1)
    job.ends_well(alone)
    assert job.sizes == [4, 2]


def preempt(cluster: Slurm) -> None:
    """Submit a job that needs all nodes, and comes before the others."""
    options = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
    cluster.call("sbatch", *options, "--wrap=sleep 1")


def test_a_preempted_job_goes_on_later(cluster: Slurm, tmp_path: Path, alone: Path) -> None:
    job = Job.submit(cluster, tmp_path, *TWO_BY_TWO, "--requeue", "--exclusive", script="srun TRAIN")
    job.makes_step(5)
    preempt(cluster)
    job.is_requeued(1)
    job.ends_well(alone)
    said = rf"unitrain: stopped by SIGTERM after step \d+ and saved in \S+ SLURM has requeued job {job.number}\."
    assert re.search(said, job.said)
    assert job.sizes == [4, 4]


def test_a_job_that_is_ended_without_a_grace_time_goes_on_where_it_was(
    cluster: Slurm, tmp_path: Path, alone: Path
) -> None:
    """SLURM sends SIGTERM all the same, and SIGKILL after its KillWait; only a SIGKILL at once loses steps."""
    options = (*TWO_BY_TWO, "--requeue", "--exclusive", "--partition=abrupt")
    job = Job.submit(cluster, tmp_path, *options, script="srun TRAIN")
    job.makes_step(8)
    cluster.call("scontrol", "requeue", job.number)
    job.is_requeued(1)
    job.makes_step(19)
    preempt(cluster)
    job.is_requeued(2)
    job.makes_step(33)
    cluster.call("scancel", "--signal=KILL", "--full", job.number)
    job.wait(lambda: "JobState=CANCELLED" in job.shown(), "it was not cancelled")
    cluster.call("scontrol", "requeue", job.number)
    job.is_requeued(3)
    job.makes_step(47)
    job.signal_ranks(signal.SIGKILL)  # as the kernel does when memory runs out
    job.wait(lambda: "JobState=FAILED" in job.shown(), "it was not killed")
    cluster.call("scontrol", "requeue", job.number)
    job.is_requeued(4)
    job.ends_well(alone)
    assert job.sizes == [4] * 5
    stopped = [int(step) for step in re.findall(r"stopped by SIGTERM after step (\d+) and saved in", job.said)]
    assert job.starts[:4] == [0, *stopped]
    assert job.starts[4] in (45, 50), "the last save before the kill"
    assert "has requeued" not in job.said, "SLURM itself, or its user, has"


def test_a_batch_script_passes_the_signal_on(cluster: Slurm, tmp_path: Path, alone: Path) -> None:
    """The signal comes within a minute of 30 s. That the tasks get it themselves is in test_slurm_page.py."""
    options = (*TWO_BY_TWO, "--requeue", "--time=2", "--signal=B:USR1@60")
    job = Job.submit(cluster, tmp_path, *options, script="exec srun TRAIN", more=slow_at_first(tmp_path))
    job.is_requeued(1)
    job.ends_well(alone)
    assert_requeued_itself(job)
