"""Two processes with the same RANK, which nobody but the ranks themselves can notice."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

SCRIPT = """
import unitrain
with unitrain.init(backend="ddp", timeout_s=40) as strategy:
    strategy.barrier()
"""


@pytest.mark.all("three interpreters")
@pytest.mark.launcher
def test_a_rank_that_comes_twice_is_named_at_once() -> None:
    """Rank 2 is missing, and nobody waits for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        job = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, **job, "RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE, text=True,
        )
        for rank in ("0", "1", "1")
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=35)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [2, 2, 2], said
    address = f"127.0.0.1:{job['MASTER_PORT']}"
    assert said[0].startswith(f"unitrain: error: two processes have come to {address} as rank 1 of 3: give every")
    assert said[1:] == ["", ""], "rank 0 has reported it, and is gone"
