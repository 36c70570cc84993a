"""horovodrun's elastic driver: a host is lost and another one added, and the job goes on by itself, with as many steps.

The discovery script names those hosts that the test wants, of three (``cluster.py``), or names of this one.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from cluster import Cluster, cluster
from elastic import STEPS, Elastic
from harness import COPIED, PROGRAM, QUICK, TIMEOUT_S, World, assert_same_training, run, train_alone
from host_commands import blocks_for, host_commands, on_hosts
from places import TESTS

from unitrain.features.horovod_elastic import asking

pytestmark = [
    pytest.mark.launcher,
    pytest.mark.skipif(find_spec("horovod") is None, reason="horovod is not installed"),
]
Test = TypeVar("Test", bound=Callable[..., None])
COMMAND, SCRIPT, SSH_CONFIG = (block.text for block in blocks_for(Path(__file__)))
SILENT = """
import socket, time
server = socket.create_server(("", 29450))
print("open", flush=True)
asking = server.accept()
print("asked", flush=True)
time.sleep(1000)
"""


def cluster_test(test: Test) -> Test:
    """Mark a test that needs a cluster, and takes minutes."""
    for mark in (pytest.mark.soak, pytest.mark.timeout(400), pytest.mark.xdist_group("cluster")):
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster"), 3) as running:
        with (running.ssh.parent / "ssh_config").open("a") as config:
            config.write(SSH_CONFIG)
        yield running


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an undisturbed run on one process."""
    return train_alone(tmp_path_factory, STEPS)


@pytest.fixture
def job(hosts: Cluster, tmp_path: Path) -> Iterator[Elastic]:
    """A job of horovodrun on the first host, not yet started."""
    [(_, command)] = host_commands(COMMAND, hosts.names, [], processes=1)
    environ = {"UNITRAIN_HEARTBEAT_TIMEOUT_S": "5", "TESTS_PAUSE": "0.5", "OMP_NUM_THREADS": "1"}
    made = Elastic(hosts, tmp_path, command, environ)
    yield made
    for host in range(3):
        hosts.plug_cable(host)
    made.end()


def set_script(job: Elastic, text: str) -> None:
    """Have this as the discovery script from now on."""
    script = job.folder / "hosts.new"
    script.write_text(text)
    script.chmod(0o755)
    script.replace(job.folder / "hosts.sh")


def set_hosts(job: Elastic, *names: str) -> None:
    """Have the discovery script print these from now on, with one process each."""
    set_script(job, "#!/bin/sh\n" + "".join(f"echo {name}:1\n" for name in names))


def rank_on(job: Elastic, host: str) -> psutil.Process:
    """Return the rank that trains on a host."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if words[1:3] == [str(PROGRAM), str(job.folder)] and process.environ()["HOROVOD_HOSTNAME"] == host:
                return process
    raise AssertionError(job.said(0))


def steps_lost(job: Elastic) -> list[int]:
    """Return how many steps were begun before each change of the hosts, and made again after it."""
    return [before.last + 1 - after.began for before, after in pairwise(job.parts())]


class OnTwoNames(World):
    """horovodrun with two names of this host, which it takes for two hosts."""

    def command(self, ranks: int, *arguments: str, program: Path = PROGRAM) -> list[str]:
        made = super().command(ranks, *arguments, program=program)
        script = Path(arguments[0], "hosts.sh")
        script.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
        script.chmod(0o755)
        elastic = ["--min-np", "1", "--network-interface", "lo", "--host-discovery-script", str(script)]
        return [made[0], *elastic, *made[1:]]


@pytest.mark.soak
def test_a_rank_is_lost(tmp_path: Path, alone: Path) -> None:
    end = run(OnTwoNames("horovodrun", "horovod"), tmp_path, fault="kill:0:8", environ=COPIED)
    assert end.job.code == 0, end.job.output
    assert end.job.output.count("began after step 7") == 1, end.job.output
    assert_same_training(tmp_path, alone)


@pytest.mark.soak
def test_a_rank_is_lost_while_horovod_initialises_it(tmp_path: Path, alone: Path) -> None:
    """Others don't learn of it there. They give up before Horovod does, which would abort them."""
    program = TESTS / "faults" / "programs" / "killed_in_horovod.py"
    end = run(OnTwoNames("horovodrun", "horovod"), tmp_path, program=program, environ=QUICK)
    assert end.job.code == 0, end.job.output
    assert "stopped because the ranks have not all joined the job within 12 s (timeout_s is 8)" in end.job.output
    assert end.seconds < 2 * TIMEOUT_S + 20
    assert_same_training(tmp_path, alone)


@cluster_test
@pytest.mark.parametrize("lost", ["node0", "node1"])
def test_a_host_is_lost_and_another_added(lost: str, job: Elastic, undisturbed: Path) -> None:
    set_hosts(job, "node0", "node1")
    job.start(0)
    job.trains(2)
    rank_on(job, lost).kill()
    job.trains(1)
    set_hosts(job, {"node0": "node1", "node1": "node0"}[lost], "node2")
    job.trains(2)
    set_hosts(job, "node2")
    job.trains(1)
    job.assert_ends_as_if_nothing_had_happened(undisturbed)
    output = job.said(0)
    assert re.search(r"resumed after step \d+, from .*, in the memory of", output), output
    assert output.count("unitrain: hosts have changed: stopped after step ") == 2, output
    assert steps_lost(job)[1:] == [0, 0], "with all ranks there, no step is done again"


@cluster_test
def test_a_host_that_can_not_be_reached_is_left_out(job: Elastic, undisturbed: Path) -> None:
    set_hosts(job, "node0", "node1")
    job.start(0)
    job.trains(2)
    set_hosts(job, "node0", "node1", "nowhere")
    job.trains(2)
    job.assert_ends_as_if_nothing_had_happened(undisturbed)
    assert "waited 40 s for rank 2, which horovodrun has not started" in job.said(0)
    assert steps_lost(job) == [0]


@cluster_test
@pytest.mark.parametrize("first", ["node0", "node1"])
def test_a_cable_is_pulled(first: str, hosts: Cluster, job: Elastic, undisturbed: Path) -> None:
    """The host of horovodrun goes on, and the ranks of the other one end. Rank 0, on the first, may be on either."""
    set_hosts(job, first)
    job.start(0)
    time.sleep(5)  # horovodrun looks every second, and waits for another host
    set_script(job, on_hosts(SCRIPT, hosts.names, processes=1))
    job.trains(2)
    assert rank_on(job, first).environ()["HOROVOD_RANK"] == "0"
    cut_off = rank_on(job, "node1")
    hosts.pull_cable(1)
    job.trains(1)
    cut_off.wait(120)
    job.assert_ends_as_if_nothing_had_happened(undisturbed)
    assert re.search(r"unitrain: rank \d on node0 \(pid \d+\): stopped because rank \d on node1 ", job.said(0))


@cluster_test
def test_a_cable_is_plugged_in_again_before_ssh_gives_up(hosts: Cluster, job: Elastic, undisturbed: Path) -> None:
    set_hosts(job, "node0", "node1")
    job.start(0)
    job.trains(2)
    hosts.pull_cable(1)
    time.sleep(9)  # more than UNITRAIN_HEARTBEAT_TIMEOUT_S, and less than ssh's patience
    hosts.plug_cable(1)
    job.trains(2)
    job.assert_ends_as_if_nothing_had_happened(undisturbed)


@cluster_test
def test_a_rank_whose_host_is_cut_off_while_it_waits_for_horovodrun(hosts: Cluster) -> None:
    server = hosts.start(0, [sys.executable, "-c", SILENT])
    assert server.stdout
    assert server.stdout.readline() == "open\n"
    address = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "node0", "HOROVOD_GLOO_RENDEZVOUS_PORT": "29450"}
    place = {"HOROVOD_HOSTNAME": "node1", "HOROVOD_LOCAL_RANK": "0"}
    waiting = hosts.start(1, [sys.executable, asking.__file__, "true"], environ={**address, **place})
    try:
        assert server.stdout.readline() == "asked\n"
        time.sleep(1)
        hosts.pull_cable(1)
        said = waiting.communicate(timeout=90)[0]
    finally:
        hosts.plug_cable(1)
        for process in (server, waiting):
            process.kill()
            process.communicate()
    assert waiting.returncode == 1, said
    assert "unitrain: node1, local rank 0: horovodrun gave no new rank at node0:29450" in said
