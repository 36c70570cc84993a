"""``unitrain run`` with the page's ``start.sh``: spare hosts replace lost ones, and the training is undisturbed."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster
from elastic import Elastic, impatient_cluster
from harness import train_alone
from host_commands import AS_ROOT, blocks_for, on_hosts

from unitrain.launch.local.toolchain import find_mpi

pytestmark = [
    pytest.mark.launcher,
    pytest.mark.xdist_group("cluster"),
    pytest.mark.skipif(find_mpi() is None, reason="there is no mpirun"),
]

STEPS = 40
START, AGAIN = (block.text for block in blocks_for(Path(__file__)))
HOSTS = ("node0", "node1", "node2")
# The settings of these tests, which mpirun takes to other hosts only if they are named.
PASSED = (
    "PATH",
    "UNITRAIN_BACKEND",
    "UNITRAIN_MEMORY_COPIES__EVERY",
    "UNITRAIN_TIMEOUT_S",
    "UNITRAIN_HEARTBEAT_TIMEOUT_S",
)
# Needs no torch: it notes the host on which it runs as rank 1, and ends once it is the only rank.
NOTES_HOSTS = """
import os, socket, sys, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    with open(sys.argv[1], "a") as file:
        print(socket.gethostname(), file=file, flush=True)
while os.environ["OMPI_COMM_WORLD_SIZE"] != "1":
    time.sleep(0.1)
"""


def write_start(folder: Path, *, processes: int) -> None:
    """Write the script of the page into a folder, for a training program that is named in its arguments."""
    assert "-x PATH" in START
    text = on_hosts(START, HOSTS, processes=processes).replace("train.py", '"$@"')
    (folder / "start.sh").write_text(
        text.replace("-x PATH", " ".join(f"-x {name}" for name in (*PASSED, "TESTS_PAUSE")))
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an undisturbed run on one process."""
    return train_alone(tmp_path_factory, STEPS)


@pytest.mark.all("starts a launcher three times")
def test_a_spare_host_replaces_a_lost_one_and_then_there_are_fewer(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(NOTES_HOSTS)
    (tmp_path / "cluster").mkdir()
    write_start(tmp_path, processes=1)
    notes, log = tmp_path / "notes", tmp_path / "log"
    notes.touch()
    with impatient_cluster(tmp_path / "cluster", len(HOSTS)) as hosts:
        command = [*shlex.split(AGAIN), str(tmp_path / "script.py"), str(notes)]
        job = hosts.start(0, command, environ=AS_ROOT, cwd=tmp_path, output=log)

        def wait_for(lines: list[str]) -> None:
            deadline = time.monotonic() + 120
            while notes.read_text().split() != lines:
                assert time.monotonic() < deadline, log.read_text()
                assert job.poll() is None, log.read_text()
                time.sleep(0.1)

        try:
            wait_for(["node1"])
            hosts.kill_all(1)
            wait_for(["node1", "node2"])
            hosts.kill_all(2)
            code = job.wait(120)
        finally:
            job.kill()
            job.communicate()
    assert code == 0
    restarts = re.findall(
        r"unitrain run: bash ended with exit code \d+ after \S+ s; restart (\d) of 10", log.read_text()
    )
    assert restarts == ["1", "2"]


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("backend", "how"),
    [
        ("ddp", Cluster.kill_all),
        ("ddp", Cluster.cut_power),
        ("fsdp", Cluster.cut_power),
        ("horovod", Cluster.cut_power),
    ],
)
def test_a_host_is_lost(backend: str, how: Callable[[Cluster, int], None], tmp_path: Path, alone: Path) -> None:
    """With sharded parameters, only the next host has a copy of what the lost one had."""
    (tmp_path / "cluster").mkdir()
    write_start(tmp_path, processes=2)
    environ = {**AS_ROOT, "UNITRAIN_MEMORY_COPIES__EVERY": "1", "UNITRAIN_BACKEND": backend}
    with impatient_cluster(tmp_path / "cluster", len(HOSTS)) as hosts:
        job = Elastic(hosts, tmp_path, shlex.split(AGAIN), environ, STEPS)
        lost = 3 if backend == "fsdp" else 1
        try:
            job.start(0)
            job.trains(4)
            how(hosts, 1)
            job.trains(4)
            if backend != "fsdp":
                how(hosts, 2)
                job.trains(2)
            job.assert_ends_as_if_nothing_had_happened(alone, lost=lost)
            said = job.said(0)
        finally:
            job.end()
    assert f"restart {1 if backend == 'fsdp' else 2} of 10" in said
    assert ("in the memory of node0" in said) == (backend == "fsdp")
