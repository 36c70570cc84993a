"""horovodrun's elastic driver: a host is lost and another one added, and the job goes on by itself, with as many steps.

The discovery script names those hosts that the test wants, of three (``cluster.py``), or names of this one.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from cluster import Cluster, cluster
from harness import COPIED, PROGRAM, TIMEOUT_S, World, assert_same_training, run
from host_commands import blocks_for, host_commands, on_hosts
from lives import EPOCHS, PHASES, assert_undisturbed, begun_again, lives, ranks
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
QUICK = {"UNITRAIN_HEARTBEAT_TIMEOUT_S": "5", "UNITRAIN_TIMEOUT_S": "40", **COPIED}


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


class Elastic:
    """An elastic job, and what happens to it meanwhile."""

    def __init__(self, hosts: Cluster, folder: Path, *slots: str) -> None:
        self.folder = folder
        self._known: set[int] = set()
        self.set_hosts(*slots)
        script = [str(PHASES), str(folder), str(EPOCHS)]
        [(host, command)] = host_commands(COMMAND, hosts.names, script, processes=1)
        environ = {**QUICK, "TESTS_PAUSE": "0.1", "OMP_NUM_THREADS": "1"}
        self.process = hosts.start(host, command, environ=environ, cwd=folder)

    def set_hosts(self, *slots: str) -> None:
        """Have the discovery script print these from now on."""
        self.set_script("#!/bin/sh\n" + "".join(f"echo {one}\n" for one in slots))

    def set_script(self, text: str) -> None:
        """Have this as the discovery script from now on."""
        script = self.folder / "hosts.new"
        script.write_text(text)
        script.chmod(0o755)
        script.replace(self.folder / "hosts.sh")

    def on(self, host: str) -> psutil.Process:
        """Return a rank of a host."""
        return next(process for _, process in ranks(self.folder) if process.environ()["HOROVOD_HOSTNAME"] == host)

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(self.process.communicate()[0])
            time.sleep(0.1)

    def train_on(self, world: int) -> None:
        """Wait until the job trains on so many ranks, in a start that is new."""
        self.wait_for(lambda: set(lives(self.folder)) - self._known)
        newest = max(lives(self.folder))
        self._known = set(lives(self.folder))

        def trains() -> bool:
            return sum(file.stat().st_size > 0 for file in self.folder.glob(f"{newest}.*.notes")) == world

        self.wait_for(trains)
        time.sleep(1)

    def output(self) -> str:
        """Wait for the end, and return what was printed."""
        try:
            output, _ = self.process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self.process.communicate()[0]) from None
        assert self.process.returncode == 0, output
        return str(output)


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
    end = run(OnTwoNames("horovodrun", "horovod"), tmp_path, program=program)
    assert end.job.code == 0, end.job.output
    assert "stopped because the ranks have not all joined the job within 12 s (timeout_s is 8)" in end.job.output
    assert end.seconds < 2 * TIMEOUT_S + 20
    assert_same_training(tmp_path, alone)


@cluster_test
@pytest.mark.parametrize("lost", ["node0", "node1"])
def test_a_host_is_lost_and_another_added(lost: str, hosts: Cluster, tmp_path: Path, undisturbed: Path) -> None:
    job = Elastic(hosts, tmp_path, "node0:1", "node1:1")
    job.train_on(2)
    job.on(lost).send_signal(signal.SIGKILL)
    job.train_on(1)
    left = {"node0": "node1", "node1": "node0"}[lost]
    job.set_hosts(f"{left}:1", "node2:1")
    job.train_on(2)
    job.set_hosts("node2:1")
    job.train_on(1)
    output = job.output()
    assert re.search(r"resumed after step \d+, from .*, in the memory of", output), output
    assert output.count("unitrain: hosts have changed: stopped after step ") == 2, output
    again = begun_again(tmp_path)
    assert again[0] <= 1, output
    assert again[1:] == [0, 0], "with all ranks there, no step is done again"
    assert_undisturbed(tmp_path, undisturbed)


@cluster_test
def test_a_host_that_can_not_be_reached_is_left_out(hosts: Cluster, tmp_path: Path, undisturbed: Path) -> None:
    job = Elastic(hosts, tmp_path, "node0:1", "node1:1")
    job.train_on(2)
    job.set_hosts("node0:1", "node1:1", "nowhere:1")
    job.train_on(2)
    output = job.output()
    assert "waited 40 s for rank 2, which horovodrun has not started" in output
    assert begun_again(tmp_path) == [0]
    assert_undisturbed(tmp_path, undisturbed)


@cluster_test
@pytest.mark.parametrize("first", ["node0", "node1"])
def test_a_cable_is_pulled(first: str, hosts: Cluster, tmp_path: Path, undisturbed: Path) -> None:
    """The host of horovodrun goes on, and the ranks of the other one end. Rank 0, on the first, may be on either."""
    job = Elastic(hosts, tmp_path, f"{first}:1")
    time.sleep(5)  # horovodrun looks every second, and waits for another host
    job.set_script(on_hosts(SCRIPT, hosts.names, processes=1))
    job.train_on(2)
    assert job.on(first).environ()["HOROVOD_RANK"] == "0"
    cut_off = job.on("node1")
    hosts.pull_cable(1)
    try:
        job.train_on(1)
        cut_off.wait(120)
        output = job.output()
    finally:
        hosts.plug_cable(1)
    assert re.search(r"unitrain: rank \d on node0 \(pid \d+\): stopped because rank \d on node1 ", output), output
    assert begun_again(tmp_path)[0] <= 1, output
    assert_undisturbed(tmp_path, undisturbed)


@cluster_test
def test_a_cable_is_plugged_in_again_before_ssh_gives_up(hosts: Cluster, tmp_path: Path, undisturbed: Path) -> None:
    job = Elastic(hosts, tmp_path, "node0:1", "node1:1")
    job.train_on(2)
    hosts.pull_cable(1)
    time.sleep(9)  # more than UNITRAIN_HEARTBEAT_TIMEOUT_S, and less than ssh's patience
    hosts.plug_cable(1)
    job.train_on(2)
    output = job.output()
    assert begun_again(tmp_path)[0] <= 1, output
    assert_undisturbed(tmp_path, undisturbed)


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
