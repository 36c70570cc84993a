"""``unitrain launch --spare``: a host is lost, a spare one takes its place, and the training is undisturbed."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import Cluster, cluster
from elastic import Elastic
from harness import train_alone
from host_commands import AS_ROOT, blocks_for, host_commands

from unitrain.commands.toolchain import find_mpi, find_program

pytestmark = [
    pytest.mark.launcher,
    pytest.mark.xdist_group("cluster"),
    pytest.mark.skipif(find_mpi() is None, reason="there is no mpirun"),
]

STEPS = 20
[COMMAND] = (block.text for block in blocks_for(Path(__file__)))
SETTINGS = {"TESTS_PAUSE": "0.15"}
# Needs no torch: it notes the host on which it runs as rank 1, and ends once it has run on the host that it is given.
NOTES_HOSTS = """
import os, pathlib, socket, sys, time
notes, last = pathlib.Path(sys.argv[1]), sys.argv[2]
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    with notes.open("a") as file:
        print(socket.gethostname(), file=file, flush=True)
while last not in notes.read_text().split():
    time.sleep(0.1)
"""


@contextmanager
def hosts_of(folder: Path) -> Iterator[Cluster]:
    folder.mkdir()
    with cluster(folder, 4, own_names_are_loopback=True) as running:
        yield running


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an undisturbed run on one process."""
    return train_alone(tmp_path_factory, STEPS)


def command_of(hosts: Cluster, script: list[str], launcher: str = "mpirun") -> list[str]:
    [(host, command)] = host_commands(COMMAND, hosts.names, script, processes=1)
    assert (host, command[0]) == (0, "unitrain")
    of_cli = [sys.executable, "-m", "unitrain.commands.cli", *command[1:]]
    return [launcher if word == "mpirun" else word for word in of_cli]


def test_hosts_take_the_places_of_lost_ones_until_none_is_left(tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    (tmp_path / "script.py").write_text(NOTES_HOSTS)
    log = tmp_path / "log"
    with hosts_of(tmp_path / "cluster") as hosts:
        hosts.kill_all(2)  # a spare one
        command = command_of(hosts, [str(tmp_path / "script.py"), str(tmp_path / "notes"), "never"])
        job = hosts.start(0, command, environ=AS_ROOT, output=log)

        def wait_for(lines: list[str]) -> None:
            deadline = time.monotonic() + 120
            while (tmp_path / "notes").read_text().split() != lines:
                assert time.monotonic() < deadline, log.read_text()
                assert job.poll() is None, log.read_text()
                time.sleep(0.1)

        try:
            wait_for(["node1"])
            hosts.kill_all(1)
            wait_for(["node1", "node3"])
            hosts.kill_all(3)
            code = job.wait(120)
        finally:
            job.kill()
            job.communicate()
    said = [line for line in log.read_text().splitlines() if line.startswith("unitrain")]
    refused = r"ssh: connect to host node\d port 22: Connection refused"
    patterns = [
        rf"unitrain launch: the spare host node2 does not answer ssh \({refused}\)\.",
        r"unitrain run: mpirun ended with exit code \d+ after \S+ s; restart 1 of 10( in \d s)?\.",
        rf"unitrain launch: node1 does not answer ssh \({refused}\): node3 takes its place\.",
        r"unitrain run: mpirun ended with exit code \d+ after \S+ s; restart 2 of 10( in \d s)?\.",
        rf"unitrain run: node3 does not answer ssh \({refused}\), and no spare host does: repair one, and start .*",
    ]
    assert code == 2
    for line, pattern in zip(said, patterns, strict=True):
        assert re.fullmatch(pattern, line), said


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("launcher", "backend", "how"),
    [
        ("mpirun", "ddp", Cluster.kill_all),
        ("mpirun", "ddp", Cluster.cut_power),
        ("mpirun", "fsdp", Cluster.cut_power),
        ("horovodrun", "horovod", Cluster.cut_power),
    ],
)
def test_a_host_is_lost(
    launcher: str, backend: str, how: Callable[[Cluster, int], None], tmp_path: Path, alone: Path
) -> None:
    """With sharded parameters, only the next host has a copy of what the lost one had."""
    if find_program(launcher) is None:
        pytest.skip(f"{launcher} is not installed")
    with hosts_of(tmp_path / "cluster") as hosts:
        environ = {**AS_ROOT, **SETTINGS, "UNITRAIN_BACKEND": backend}
        job = Elastic(hosts, tmp_path, command_of(hosts, [], launcher), environ, STEPS)
        try:
            job.start(0)
            job.trains(2)
            how(hosts, 1)
            job.trains(2)
            job.assert_ends_as_if_nothing_had_happened(alone, lost=3 if backend == "fsdp" else 1)
            said = job.said(0)
        finally:
            hosts.plug_cable(1)
            job.end()
    assert re.search(r"unitrain launch: node1 does not answer ssh \(.*\): node2 takes its place\.", said), said
    assert ("in the memory of node0" in said) == (backend == "fsdp")
