"""Jobs of several hosts that have names, addresses and sshd (tests/cluster.py), started as on a cluster."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cluster import Cluster, cluster
from harness import HEARTBEAT_S, PROGRAM, QUICK, notes

pytestmark = [pytest.mark.launcher, pytest.mark.xdist_group("cluster")]

TRAINS = Path(__file__).parent.parent / "programs" / "trains.py"
ENDS_S = 90


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # gloo would listen at a loopback address there, where the other host can't connect.
    with cluster(tmp_path_factory.mktemp("cluster"), 2, own_names_are_loopback=True) as running:
        yield running


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Return the weights that a single process trains."""
    folder = tmp_path_factory.mktemp("expected")
    subprocess.run([sys.executable, str(TRAINS), str(folder)], check=True, timeout=ENDS_S)
    weights: dict[str, torch.Tensor] = torch.load(folder / "trained.pt")["model"]
    return weights


def commands(way: str, port: int) -> list[list[str]]:
    """Return the commands that start four ranks, and wait for a script: one, on node0, or one for each host."""
    here = [sys.executable]
    mpirun = ["mpirun", "--allow-run-as-root", "-np", "4", "-H", "node0:2,node1:2", "-x", "UNITRAIN_TIMEOUT_S"]
    torchrun = ["torchrun", "--nnodes", "2", "--nproc-per-node", "2"]
    at_node0 = ["--master-addr", "node0", "--master-port", str(port)]
    ways = {
        "mpirun-ddp": [[*mpirun, "-x", "UNITRAIN_BACKEND=ddp", *here]],
        "mpirun-horovod": [[*mpirun, "-x", "UNITRAIN_BACKEND=horovod", *here]],
        "horovodrun-gloo": [["horovodrun", "--gloo", "-np", "4", "-H", "node0:2,node1:2", *here]],
        "horovodrun-mpi": [["horovodrun", "--mpi", "-np", "4", "-H", "node0:2,node1:2", *here]],
        "torchrun-static": [[*torchrun, "--node-rank", rank, *at_node0] for rank in "01"],
        "torchrun-c10d": [[*torchrun, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"node0:{port}"]] * 2,
    }
    return ways[way]


def run(hosts: Cluster, way: str, port: int, *arguments: str) -> str:
    """Run a job on both hosts to its end, and return its output."""
    jobs = [
        hosts.start(host, [*command, *arguments], environ={"UNITRAIN_TIMEOUT_S": "30"}, cwd=Path("/"))
        for host, command in enumerate(commands(way, port))
    ]
    said = ""
    try:
        said = "".join(job.communicate(timeout=ENDS_S)[0] for job in jobs)
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0] * len(jobs), said
    return said


WAYS = ["torchrun-c10d"]
MORE = ["mpirun-horovod", "torchrun-static", "mpirun-ddp", "horovodrun-gloo", "horovodrun-mpi"]


@pytest.mark.parametrize("way", [*WAYS, *(pytest.param(way, marks=pytest.mark.soak) for way in MORE)])
def test_two_hosts_train_as_one_process_does(
    hosts: Cluster, way: str, expected: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    run(hosts, way, 29500 + [*WAYS, *MORE].index(way), str(TRAINS), str(tmp_path))
    saved = torch.load(tmp_path / "trained.pt")
    assert saved["world_size"] == 4
    assert saved["places"] == [(0, 0, "node0"), (1, 0, "node0"), (0, 1, "node1"), (1, 1, "node1")]
    for name, value in expected.items():
        torch.testing.assert_close(saved["model"][name], value, rtol=0, atol=1e-9)


def test_a_host_whose_cable_is_pulled(hosts: Cluster, tmp_path: Path) -> None:
    """Both sides end, and each names a host of the other."""
    environ = {**QUICK, "TESTS_PAUSE": "0.1"}
    jobs = [
        hosts.start(host, [*command, str(PROGRAM), str(tmp_path), "1000", "none:0:0"], environ=environ)
        for host, command in enumerate(commands("torchrun-static", 29540))
    ]
    try:
        deadline = time.monotonic() + ENDS_S
        while not any(note["step"] > 3 for note in notes(tmp_path)):
            assert time.monotonic() < deadline
            assert [job.poll() for job in jobs] == [None, None]
            time.sleep(0.1)
        hosts.pull_cable(1)
        began = time.monotonic()
        said = [job.communicate(timeout=ENDS_S)[0] for job in jobs]
        seconds = time.monotonic() - began
    finally:
        hosts.plug_cable(1)
        for job in jobs:
            job.kill()
    assert all(job.returncode for job in jobs), said
    for own, other in ((0, 1), (1, 0)):
        found = re.findall(rf"unitrain: rank \d on node{own} \(pid \d+\): (stopped .*)", said[own])
        assert found, said[own]
        assert any(f"node{other}" in line for line in found), found
    assert seconds < 2 * HEARTBEAT_S + 30, said  # torchrun takes up to 30 s to end


@pytest.mark.soak
@pytest.mark.parametrize("way", [*WAYS, *MORE])
def test_hosts_that_find_their_own_names_at_the_addresses_that_others_know(way: str, tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    with cluster(tmp_path / "cluster", 2) as hosts:
        run(hosts, way, 29550, str(TRAINS), str(tmp_path))
    assert torch.load(tmp_path / "trained.pt")["world_size"] == 4
