"""What may keep a process of a job after its script."""

from __future__ import annotations

import subprocess
import sys

import pytest

from unitrain.job.starting.spawn import spawn_environments

# The main thread ends at once, and another one trains for longer than a process may stay.
SCRIPT = """
import threading, time, torch, unitrain
strategy = unitrain.init(backend="ddp", heartbeat_timeout_s=1, timeout_s=3)
def train():
    for _ in range(25):
        strategy.all_reduce(torch.ones(1))
        time.sleep(0.2)
    strategy.close()
threading.Thread(target=train).start()
"""


@pytest.mark.soak
def test_what_still_trains_or_waits_may_stay() -> None:
    """test_exits.py has what may not."""
    with spawn_environments(2) as environments:
        ranks = [
            subprocess.Popen([sys.executable, "-c", SCRIPT], env=environ, stderr=subprocess.PIPE, text=True)
            for environ in environments
        ]
        said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert said == ["", ""]
