"""Jobs of SLURM that lose a node, are preempted, or have nodes of different sizes, in a real SLURM (tests/slurm.py)."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import PROGRAM, QUICK, assert_same_training, notes, train_alone
from slurm import NODES, Slurm, local_slurm, slurm_missing

pytestmark = [pytest.mark.launcher, pytest.mark.xdist_group("slurm"), pytest.mark.soak]

BIN = Path(sys.executable).parent
TRAINS = Path(__file__).parent.parent / "programs" / "trains.py"
STEPS = 70
ENDS_S = 300.0  # SLURM starts a requeued job after two minutes


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A SLURM of its own, whose nodes a test may lose."""
    reason = slurm_missing()
    if reason is not None:
        pytest.skip(reason)
    with local_slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an undisturbed run on one process."""
    return train_alone(tmp_path_factory, STEPS)


class Job:
    """A batch job that trains."""

    def __init__(self, slurm: Slurm, folder: Path, *options: str, script: str) -> None:
        self._slurm = slurm
        self._folder = folder
        self._log = folder / "job.log"
        train = f"{sys.executable} {PROGRAM} {folder} {STEPS} none:0:0"
        (folder / "job.sh").write_text(f"#!/bin/bash\n{script.replace('TRAIN', train)}")
        environ = {**slurm.env, **QUICK, "TESTS_PAUSE": "0.3", "UNITRAIN_TIMEOUT_S": "60", "UNITRAIN_BACKEND": "ddp"}
        environ["PATH"] = f"{BIN}:{os.environ['PATH']}"
        made = subprocess.run(
            ["sbatch", "--parsable", "--open-mode=append", f"--output={self._log}", *options, "job.sh"],
            env=environ, cwd=folder, capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        self.number = made.stdout.strip()

    @property
    def said(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def shown(self) -> str:
        return self._slurm.call("scontrol", "show", "job", self.number)

    def wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + ENDS_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}\n{self.shown()}\n{self.said}"
            time.sleep(0.2)

    def makes_step(self, step: int) -> None:
        self.wait(lambda: any(note["step"] >= step for note in notes(self._folder)), f"it did not come to step {step}")

    def ends_well(self, alone: Path) -> None:
        self.wait(lambda: "JobState=COMPLETED" in self.shown(), "it did not end well")
        assert_same_training(self._folder, alone)

    @property
    def starts(self) -> list[int]:
        """After which steps it has begun."""
        return [int(step) for step in re.findall(r"began after step (\d+)", self.said)]

    @property
    def sizes(self) -> list[int]:
        """With how many ranks it has begun, in order."""
        files = [file.name.split(".") for file in self._folder.glob("*.notes")]
        return [sum(int(name[0]) == began for name in files) for began in self.starts]


ON_WHAT_IS_LEFT = """
cat > step.sh <<'END'
nodes=$(squeue --noheader --jobs $SLURM_JOB_ID --format %N)
count=$(scontrol show hostnames $nodes | wc -l)
exec srun --no-kill --nodes $count --nodelist $nodes --ntasks $((2 * count)) TRAIN
END
exec unitrain run --max-restarts 3 -- bash step.sh
"""


def test_an_allocation_shrinks(cluster: Slurm, tmp_path: Path, alone: Path) -> None:
    job = Job(cluster, tmp_path, "--nodes=2", "--ntasks-per-node=2", "--no-kill", script=ON_WHAT_IS_LEFT)
    job.makes_step(5)
    cluster.lose(NODES[1])
    job.ends_well(alone)
    assert job.sizes == [4, 2]
    assert "emergency checkpoint: rank" in job.said


@pytest.mark.parametrize("lost", NODES)  # the first has the batch script
def test_a_job_is_requeued_when_a_node_fails(cluster: Slurm, tmp_path: Path, alone: Path, lost: str) -> None:
    # With --ntasks-per-node for sbatch, SLURM would wait for two nodes.
    job = Job(cluster, tmp_path, "--nodes=1-2", "--exclusive", "--requeue", script="srun --ntasks-per-node 2 TRAIN")
    job.makes_step(5)
    cluster.lose(lost)
    job.ends_well(alone)
    assert job.sizes == [4, 2]
    assert "Restarts=1" in job.shown()


def test_a_preempted_job_goes_on_later(cluster: Slurm, tmp_path: Path, alone: Path) -> None:
    job = Job(cluster, tmp_path, "--nodes=2", "--ntasks-per-node=2", "--requeue", "--exclusive", script="srun TRAIN")
    job.makes_step(5)
    cluster.call("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    job.ends_well(alone)
    said = rf"unitrain: stopped by SIGTERM after step \d+ and saved in \S+ SLURM has requeued job {job.number}\."
    assert re.search(said, job.said)
    assert job.sizes == [4, 4]


LAYOUTS = {
    "tasks per node": ("srun -N 2 --ntasks-per-node 2 {python}", 4),
    "nodes of different sizes": ("srun -N 2 -n 3 {python}", 3),
    "torchrun in a job": (
        "srun -N 2 --ntasks-per-node 1 torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d "
        "--rdzv-endpoint 127.0.0.1:{port}",
        4,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(slurm: Slurm, tmp_path: Path, layout: str) -> None:
    command, ranks = LAYOUTS[layout]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environ = {**slurm.env, "PATH": f"{BIN}:{os.environ['PATH']}"}
    trained: list[dict[str, Any]] = []
    for start in (sys.executable, command.format(python=sys.executable, port=port)):
        folder = tmp_path / str(len(trained))
        folder.mkdir()
        subprocess.run([*start.split(), str(TRAINS), str(folder)], env=environ, check=True, timeout=ENDS_S)
        trained.append(torch.load(folder / "trained.pt"))
    assert trained[1]["world_size"] == ranks
    for name, value in trained[0]["model"].items():
        torch.testing.assert_close(trained[1]["model"][name], value, rtol=0, atol=1e-9)
