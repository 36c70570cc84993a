"""``unitrain run`` with the page's ``start.sh``: spare hosts replace lost ones."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path

import pytest
from elastic import impatient_cluster
from host_commands import AS_ROOT, blocks_for, on_hosts

from unitrain.launch.local.toolchain import find_mpi

pytestmark = [
    pytest.mark.launcher,
    pytest.mark.xdist_group("cluster"),
    pytest.mark.skipif(find_mpi() is None, reason="there is no mpirun"),
]

START, AGAIN = (block.text for block in blocks_for(Path(__file__)))
HOSTS = ("node0", "node1", "node2")
# Needs no torch: it notes the host on which it runs as rank 1, and ends once it is the only rank.
NOTES_HOSTS = """
import os, socket, sys, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    with open(sys.argv[1], "a") as file:
        print(socket.gethostname(), file=file, flush=True)
while os.environ["OMPI_COMM_WORLD_SIZE"] != "1":
    time.sleep(0.1)
"""


@pytest.mark.all("starts a launcher three times")
def test_a_spare_host_replaces_a_lost_one_and_then_there_are_fewer(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(NOTES_HOSTS)
    (tmp_path / "cluster").mkdir()
    assert "train.py" in START
    (tmp_path / "start.sh").write_text(on_hosts(START, HOSTS, processes=1).replace("train.py", '"$@"'))
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
