"""Jobs of several hosts that have names, addresses and sshd (``cluster.py``), started as the pages say."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, cluster
from harness import HEARTBEAT_S, PROGRAM, QUICK, notes
from host_commands import AS_ROOT, blocks_for, host_commands
from trained import TRAINS, Weights, assert_trained, expected

__all__ = ["expected"]  # the fixture
pytestmark = [pytest.mark.launcher, pytest.mark.xdist_group("cluster")]

BLOCKS = {block.place: block.text for block in blocks_for(Path(__file__))}
NUMBERED, MPICH = (next(place for place, text in BLOCKS.items() if part in text) for part in ("--node-rank", " -hosts"))
STARTS = [place for place in BLOCKS if place != MPICH]
[TORCHRUN] = (place for place in STARTS if "torchrun" in place and place != NUMBERED)
ENDS_S = 90
LATER = pytest.mark.all("four interpreters; two hosts meet in test_rendezvous.py")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # gloo would listen at a loopback address there, where the other host can't connect.
    with cluster(tmp_path_factory.mktemp("cluster"), 2, own_names_are_loopback=True) as running:
        yield running


def run(hosts: Cluster, place: str, *script: str, processes: int = 2) -> None:
    """Run the block of a page, with so many processes on each host, to its end."""
    jobs = [
        hosts.start(host, command, environ=AS_ROOT, cwd=Path("/"))
        for host, command in host_commands(BLOCKS[place], hosts.names, script, processes=processes)
    ]
    try:
        said = "".join(job.communicate(timeout=ENDS_S)[0] for job in jobs)
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0] * len(jobs), said


@pytest.mark.parametrize(
    ("place", "processes"),
    [
        pytest.param(one, processes, marks=LATER if (one, processes) == (TORCHRUN, 1) else pytest.mark.soak)
        for one in STARTS
        for processes in (1, 2)
    ],
)
def test_two_hosts_train_as_one_process_does(
    hosts: Cluster, place: str, processes: int, expected: Weights, tmp_path: Path
) -> None:
    run(hosts, place, str(TRAINS), str(tmp_path), processes=processes)
    saved = assert_trained(tmp_path, expected, world_size=2 * processes)
    assert saved["places"] == [(local, host, f"node{host}") for host in range(2) for local in range(processes)]
    wanted = re.search(r"UNITRAIN_BACKEND=(\w+)", BLOCKS[place])
    assert saved["backend"] == (wanted[1] if wanted else "ddp" if "torchrun" in place else "horovod")


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("mpiexec.mpich") is None, reason="MPICH is not installed: apt-get install mpich")
def test_mpich(hosts: Cluster, expected: Weights, tmp_path: Path) -> None:
    """With an address of rank 0's host, since mpi4py here is for Open MPI."""
    [(host, [program, *words])] = host_commands(BLOCKS[MPICH], hosts.names, [str(TRAINS), str(tmp_path)])
    assert program == "mpirun"  # this one's is Open MPI's
    master = {"MASTER_ADDR": "node0", "MASTER_PORT": "29450"}
    job = hosts.start(host, ["mpiexec.mpich", *words], environ=master, cwd=Path("/"))
    said = job.communicate(timeout=ENDS_S)[0]
    assert job.returncode == 0, said
    assert_trained(tmp_path, expected, world_size=4)


@pytest.mark.soak
def test_a_host_whose_cable_is_pulled(hosts: Cluster, tmp_path: Path) -> None:
    """Both sides end, and each names a host of the other."""
    script = [str(PROGRAM), str(tmp_path), "1000", "none:0:0"]
    jobs = [
        hosts.start(host, command, environ={**QUICK, "TESTS_PAUSE": "0.1"})
        for host, command in host_commands(BLOCKS[NUMBERED], hosts.names, script, processes=1)
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
