"""What may keep a process of a job after its script, and what may not."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from unitrain.job.starting.spawn import spawn_environments

SETTINGS = "backend='ddp', heartbeat_timeout_s=1, timeout_s=3"


def run(folder: Path, script: str) -> list[tuple[int | None, str]]:
    """Run a script on two ranks whose stdout nobody reads, and return their codes (None: it still ran) and stderr."""
    (folder / "script.py").write_text(f"import unitrain\nSETTINGS = dict({SETTINGS})\n{textwrap.dedent(script)}")
    with spawn_environments(2) as environments:
        ranks = []
        for rank, environ in enumerate(environments):
            with (folder / f"stderr {rank}").open("wb") as stderr:
                command = [sys.executable, str(folder / "script.py")]
                ranks.append(
                    subprocess.Popen(
                        command, env={**environ, "PYTHONUNBUFFERED": ""}, stdout=subprocess.PIPE, stderr=stderr
                    )
                )
        codes: list[int | None] = []
        deadline = time.monotonic() + 30
        for process in ranks:
            try:
                codes.append(process.wait(max(1.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
            process.kill()
            process.communicate()
    return [(code, (folder / f"stderr {rank}").read_text()) for rank, code in enumerate(codes)]


@pytest.mark.all("two interpreters")
def test_a_reader_of_stdout_that_has_stopped(tmp_path: Path) -> None:
    script = """
        import os
        strategy = unitrain.init(**SETTINGS)
        strategy.close()
        if strategy.rank == 1:
            os.set_blocking(1, False)
            try:
                while True:
                    os.write(1, b"x" * 4096)
            except BlockingIOError:
                os.set_blocking(1, True)
            print("last words")
    """
    (code, said), (code_1, said_1) = run(tmp_path, script)
    assert (code, said) == (0, "")
    assert code_1 == 1
    assert (
        "has not exited 1 s after the end of its script: it waits for an exit handler, or the reader of its" in said_1
    )
    assert "stopped because it did not exit within 3 s" in said_1.splitlines()[-1]


@pytest.mark.soak
def test_what_still_trains_or_waits_may_stay(tmp_path: Path) -> None:
    """The main threads end at once, and other threads train for longer than a process may stay."""
    script = """
        import threading, time
        strategy = unitrain.init(**SETTINGS)
        def train():
            for _ in range(25):
                strategy.all_reduce(__import__("torch").ones(1))
                time.sleep(0.2)
            strategy.close()
        threading.Thread(target=train).start()
    """
    assert run(tmp_path, script) == [(0, ""), (0, "")]
