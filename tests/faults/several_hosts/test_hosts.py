"""Jobs of two hosts with one rank each, as far as the launchers leave them to themselves."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import PROGRAM, QUICK
from hosts import joined_hosts

pytestmark = pytest.mark.launcher


def start(hosts: Sequence[str], address: str, folder: Path, fault: str) -> list[subprocess.Popen[str]]:
    """Start a rank on each host, with its own host name, by hand: no launcher ends the others."""
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": address}
    job |= {"MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0", "UNITRAIN_BACKEND": "ddp", **QUICK}
    ranks = []
    for rank, host in enumerate(hosts):
        named = ["unshare", "--uts", "sh", "-c", f'hostname host{rank}; exec "$@"', "sh"]
        command = ["ip", "netns", "exec", host, *named, sys.executable, str(PROGRAM), str(folder), "10", fault]
        ranks.append(
            subprocess.Popen(
                command, env={**os.environ, **job, "RANK": str(rank)},
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
            )
        )  # fmt: skip
    return ranks


def ended(ranks: Sequence[subprocess.Popen[str]]) -> tuple[list[int], str]:
    """Return the exit codes of the ranks, and what they have said."""
    try:
        said = "".join(rank.communicate(timeout=60)[1] for rank in ranks)
        return [rank.returncode for rank in ranks], said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.soak
@pytest.mark.parametrize("frozen", [1, 0])
def test_a_frozen_rank_that_is_alone_on_its_host(tmp_path: Path, frozen: int) -> None:
    """The others can't kill it from their hosts, and nobody who starts ranks by hand does. It ends when it can."""
    with joined_hosts("10.99.0.1/24", "10.99.0.2/24") as hosts:
        ranks = start(hosts, "10.99.0.1", tmp_path, f"stop:{frozen}:3")
        ranks[1 - frozen].wait(60)
        ranks[frozen].send_signal(signal.SIGCONT)
        codes, said = ended(ranks)
    assert codes == [1, 1], said
    frozen_one = rf"rank {frozen} on host{frozen} \(pid \d+\)"
    assert re.search(rf"rank {1 - frozen} on .*: stopped because {frozen_one} sent no heartbeat for \d s", said)


@pytest.mark.soak
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_hosts_that_have_ipv6_only(tmp_path: Path) -> None:
    with joined_hosts("fd99::1/64", "fd99::2/64") as hosts:
        codes, said = ended(start(hosts, "fd99::1", tmp_path, "none:0:0"))
    assert codes == [0, 0], said
