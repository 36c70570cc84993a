"""A job of torchrun --nnodes 1:2 goes on by itself, on as many hosts as there are; the commands are the page's."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from elastic import STEPS, Elastic, impatient_cluster
from harness import train_alone
from host_commands import blocks_for, host_commands

pytestmark = [pytest.mark.launcher, pytest.mark.xdist_group("cluster"), pytest.mark.soak]

HOSTS = ("node0", "node1")
ELASTIC, STORE = (block.text for block in blocks_for(Path(__file__)))
EXPORT, TORCHRUN = (words for _, words in host_commands(ELASTIC, HOSTS[:1], []))
NEW_STORES = dict([EXPORT[1].split("=")])
ENDPOINT = TORCHRUN.index("--rdzv-endpoint") + 1
# torchrun counts a host out after 15 s of silence, then waits 30 s for others, and 60 s for an answer of its store.
SOON = "keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=3,read_timeout=10"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with impatient_cluster(tmp_path_factory.mktemp("cluster"), 3) as running:
        yield running


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an undisturbed run on one process."""
    return train_alone(tmp_path_factory, STEPS)


@pytest.fixture
def started(hosts: Cluster, tmp_path: Path) -> Iterator[Callable[..., Elastic]]:
    """Makes a job of torchrun, whose store is at an endpoint. Ends it after the test."""
    made: list[Elastic] = []

    def make(endpoint: str) -> Elastic:
        torchrun = [*TORCHRUN[:ENDPOINT], endpoint, *TORCHRUN[ENDPOINT + 1 :], "--rdzv-conf", SOON]
        made.append(Elastic(hosts, tmp_path, torchrun, NEW_STORES))
        return made[-1]

    yield make
    for host in range(3):
        hosts.plug_cable(host)
    for job in made:
        job.end()


def test_a_rank_dies_a_host_is_lost_and_comes_back(
    hosts: Cluster, started: Callable[..., Elastic], alone: Path
) -> None:
    job = started("node0:29600")
    job.start(0, 1)
    job.trains(4)
    job.ranks_on(1)[3].kill()
    job.trains(4)
    job.cut_power(1)
    job.trains(2)
    hosts.plug_cable(1)
    job.start(1)
    job.trains(4)
    job.assert_ends_as_if_nothing_had_happened(alone)
    assert len(re.findall(r"resumed after step \d+, from .*, in the memory of", job.said(0))) == 2
    assert job.said(0).count("unitrain: stopped by SIGTERM after step") == 1, "when torchrun started it with both hosts"


@pytest.mark.parametrize("lost", [1, 2])
def test_a_host_of_a_sharded_job_is_lost(
    hosts: Cluster, started: Callable[..., Elastic], alone: Path, lost: int
) -> None:
    """No survivor has all of the state, but the next host has a copy of what was in the lost one's memory."""
    job = started("node0:29604")
    job.command = [word.replace("1:2", "1:3") for word in job.command]
    job.environ = {**job.environ, "UNITRAIN_BACKEND": "fsdp"}
    job.start(0, 1, 2)
    job.trains(6)
    job.cut_power(lost)
    job.trains(4)
    hosts.plug_cable(lost)
    job.start(lost)
    job.trains(6)
    job.assert_ends_as_if_nothing_had_happened(alone, lost=3)
    assert re.search(rf"resumed after step \d+, from .*, in the memory of node0 and node{3 - lost}: ", job.said(0))


def test_a_host_is_drained(hosts: Cluster, started: Callable[..., Elastic], alone: Path) -> None:
    """torchrun gets a SIGTERM there, as before an eviction or when its node is needed."""
    job = started("node0:29601")
    job.start(0, 1)
    job.trains(4)
    job.started[1].terminate()
    assert job.ends(1) != 0
    assert "unitrain: stopped by SIGTERM after step" in job.said(0)
    del job.started[1]
    job.trains(2)
    job.assert_ends_as_if_nothing_had_happened(alone)


def test_a_cable_is_pulled_and_plugged_in_again(hosts: Cluster, started: Callable[..., Elastic], alone: Path) -> None:
    """torchrun ends on the host that is cut off; unitrain run starts it again until it finds the others."""
    job = started("node0:29602")
    job.start(0)
    job.start(1, under=[sys.executable, "-m", "unitrain.commands.cli", "run", "--max-restarts", "20", "--"])
    job.trains(4)
    hosts.pull_cable(1)
    job.trains(2)
    hosts.plug_cable(1)
    job.trains(4)
    job.assert_ends_as_if_nothing_had_happened(alone)


@pytest.mark.parametrize("how", [Cluster.kill_all, Cluster.cut_power])
def test_the_host_of_the_store_is_lost(
    hosts: Cluster, started: Callable[..., Elastic], alone: Path, how: Callable[[Cluster, int], None]
) -> None:
    """torchrun can't go on anywhere: it ends soon, and the same command with another endpoint goes on."""
    job = started("node0:29603")
    job.start(0, 1)
    job.trains(4)
    began = time.monotonic()
    how(hosts, 0)
    job.started.pop(0).wait(10)
    assert job.ends(1) != 0
    assert time.monotonic() - began < 60, job.said(1)
    other = started("node1:29604")
    other.start(1)
    other.trains(2)
    other.assert_ends_as_if_nothing_had_happened(alone)
    assert re.search(r"resumed after step \d+, from .*, in the memory of node1", other.said(1))


def test_the_first_host_is_lost_but_not_the_store(hosts: Cluster, started: Callable[..., Elastic], alone: Path) -> None:
    store = hosts.start(2, shlex.split(STORE))
    try:
        job = started("node2:29400")
        job.start(0, 1)
        job.trains(4)
        job.cut_power(0)
        job.trains(2)
        hosts.plug_cable(0)
        job.start(0)
        job.trains(4)
        job.assert_ends_as_if_nothing_had_happened(alone)
    finally:
        store.kill()
        store.communicate()
