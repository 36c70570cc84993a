"""Job arrays of SLURM: several trainings at once on the same nodes, each in its own folder; and all in the same."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from batch import Job, alone, cluster, environ, from_page
from slurm import NODES, Slurm

__all__ = ["alone", "cluster"]  # fixtures
pytestmark = [pytest.mark.launcher, pytest.mark.xdist_group("slurm"), pytest.mark.soak, pytest.mark.timeout(900)]

OWN_FOLDER = "runs/$SLURM_ARRAY_TASK_ID"


def submit(slurm: Slurm, folder: Path, trains_in: str, *options: str, tasks: int = 3) -> tuple[str, list[Job]]:
    """Submit the array of the page, and return its id and its tasks."""
    text = from_page("--array").replace(OWN_FOLDER, trains_in)
    text = text.replace("sbatch", " ".join(("sbatch", *options))).replace("0-2", f"0-{tasks - 1}")
    (folder / "runs").mkdir()
    done = subprocess.run(
        ["bash", "-c", text], cwd=folder, env=environ(slurm),
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    number = done.stdout.split()[-1]
    return number, [
        Job(
            slurm,
            f"{number}_{task}",
            folder / trains_in.replace("$SLURM_ARRAY_TASK_ID", str(task)),
            folder / f"slurm-{number}_{task}.out",
        )
        for task in range(tasks)
    ]


def own_id(task: Job) -> str:
    return task.shown().split()[0].removeprefix("JobId=")


def of_the_array(number: str, tasks: list[Job]) -> Job:
    """Return the task whose id is that of the array: the one that SLURM has started last."""
    [same] = [task for task in tasks if own_id(task) == number]
    return same


def test_each_task_of_an_array_goes_on_for_itself(cluster: Slurm, tmp_path: Path, alone: Path) -> None:
    """Two run at once, since SLURM gives each the memory of a node. The id of one of them is that of the array."""
    _, tasks = submit(cluster, tmp_path, OWN_FOLDER, tasks=2)
    for task in tasks:
        task.makes_step(5)
    for task in tasks:
        task.signal_ranks(signal.SIGUSR1)  # as SLURM at the time limit
    for task in tasks:
        task.is_requeued(1)
    for task in tasks:
        task.ends_well(alone)
        assert task.sizes == [2, 2]
        assert f"SLURM has requeued job {task.number}." in task.said


def test_a_task_of_an_array_is_not_requeued_for_another(cluster: Slurm, tmp_path: Path) -> None:
    """While others are preempted, with time to save, the one whose id is that of the array is cancelled."""
    number, tasks = submit(cluster, tmp_path, OWN_FOLDER, "--exclusive", tasks=2)
    for task in tasks:
        task.makes_step(2)
    cancelled = of_the_array(number, tasks)
    [preempted] = [task for task in tasks if task is not cancelled]
    [node] = [node for node in NODES if f" NodeList={node}" in preempted.shown()]
    cluster.call("sbatch", "--partition=urgent", f"--nodelist={node}", "--exclusive", "--output=/dev/null", "--wrap=:")
    preempted.wait(lambda: "PreemptTime=None" not in preempted.shown(), "it is not preempted")
    cluster.call("scancel", cancelled.number)
    preempted.is_requeued(1)
    cluster.call("scancel", preempted.number)
    assert "stopped by SIGTERM" in cancelled.said
    assert "requeued" not in cancelled.said
    cancelled.wait(lambda: "JobState=CANCELLED" in cancelled.shown(), "it goes on")
