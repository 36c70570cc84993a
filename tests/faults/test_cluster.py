"""Jobs of several hosts that have names, addresses and sshd (tests/cluster.py), started as the pages say."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from cluster import Cluster, cluster
from harness import HEARTBEAT_S, PROGRAM, QUICK, notes
from host_commands import AS_ROOT, blocks_for, host_commands
from page_blocks import Block
from trained import TRAINS, Weights, assert_trained, expected

__all__ = ["expected"]  # the fixture
pytestmark = [pytest.mark.launcher, pytest.mark.xdist_group("cluster")]

BLOCKS = [block for block in blocks_for(Path(__file__)) if "train.py" in block.text]
[DOCTOR] = [block for block in blocks_for(Path(__file__)) if "doctor" in block.text]
NUMBERED = next(block.text for block in BLOCKS if "--node-rank" in block.text)
ENDS_S = 90


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # gloo would listen at a loopback address there, where the other host can't connect.
    with cluster(tmp_path_factory.mktemp("cluster"), 2, own_names_are_loopback=True) as running:
        yield running


def run(hosts: Cluster, text: str, script: Sequence[str]) -> None:
    """Run a job of two processes on each host to its end."""
    jobs = [
        hosts.start(host, command, environ=AS_ROOT, cwd=Path("/"))
        for host, command in host_commands(text, hosts.names, script)
    ]
    try:
        said = "".join(job.communicate(timeout=ENDS_S)[0] for job in jobs)
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0] * len(jobs), said


def of_pages(*quick: str) -> pytest.MarkDecorator:
    """Parametrise a test by blocks: the first of these pages always, the others in ``make soak`` only."""
    first = [next(block for block in BLOCKS if page in block.place) for page in quick]
    return pytest.mark.parametrize(
        "block",
        [pytest.param(one, id=one.place, marks=[] if one in first else [pytest.mark.soak]) for one in BLOCKS],
    )


@of_pages("torchrun.md")
def test_two_hosts_train_as_one_process_does(hosts: Cluster, block: Block, expected: Weights, tmp_path: Path) -> None:
    run(hosts, block.text, [str(TRAINS), str(tmp_path)])
    saved = assert_trained(tmp_path, expected, world_size=4)
    assert saved["places"] == [(0, 0, "node0"), (1, 0, "node0"), (0, 1, "node1"), (1, 1, "node1")]
    wanted = re.search(r"UNITRAIN_BACKEND.(\w+)", block.text)
    assert saved["backend"] == (wanted[1] if wanted else "ddp" if "torchrun" in block.text else "horovod")


def test_a_host_whose_cable_is_pulled(hosts: Cluster, tmp_path: Path) -> None:
    """Both sides end, and each names a host of the other."""
    script = [str(PROGRAM), str(tmp_path), "1000", "none:0:0"]
    jobs = [
        hosts.start(host, command, environ={**QUICK, "TESTS_PAUSE": "0.1"})
        for host, command in host_commands(NUMBERED, hosts.names, script)
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
@of_pages()
def test_hosts_that_find_their_own_names_at_the_addresses_that_others_know(
    block: Block, expected: Weights, tmp_path: Path
) -> None:
    (tmp_path / "cluster").mkdir()
    with cluster(tmp_path / "cluster", 2) as hosts:
        run(hosts, block.text, [str(TRAINS), str(tmp_path)])
    assert_trained(tmp_path, expected, world_size=4)


@pytest.mark.soak
def test_the_doctor_finds_nothing_that_keeps_hosts_from_training(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as hosts:
        run(hosts, DOCTOR.text, [])
