"""The process beside a rank that is alone on its host: it kills the rank that stalls, and nothing else."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

# Beats for a while, and then does what the argument says.
SCRIPT = """
import os, signal, sys, time
from unitrain.job.watch.reaper import Reaper
reaper = Reaper("rank 1", 1.0)
for _ in range(8):
    reaper.beat()
    time.sleep(0.2)
print("beating", flush=True)
if sys.argv[1] == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
elif sys.argv[1] == "hold":
    import ctypes, faulthandler
    faulthandler.enable()
    ctypes.PyDLL(None).sleep(600)
elif sys.argv[1] == "close":
    reaper.close()
elif sys.argv[1] == "beat":
    while True:
        reaper.beat()
        time.sleep(0.2)
"""


@contextmanager
def rank(does: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """Start a rank, and yield it and its reaper when it has beaten for a while."""
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), does]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            (reaper,) = _children(process.pid)
            assert process.stdout.readline() == "beating\n"
            yield process, reaper
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _children(pid: int) -> list[psutil.Process]:
    deadline = time.monotonic() + 20
    while not (found := psutil.Process(pid).children()):
        assert time.monotonic() < deadline, "it has started no reaper"
        time.sleep(0.05)
    return found


def test_a_stopped_rank_is_killed() -> None:
    with rank("stop") as (process, reaper):
        _, said = process.communicate(timeout=20)
        assert process.returncode == -signal.SIGKILL
        assert re.fullmatch(r"unitrain: rank 1 sent no heartbeat for \d s: killing it\.\n", said)
        reaper.wait(5)


def test_a_rank_that_holds_the_gil_prints_its_stack() -> None:
    with rank("hold") as (process, _):
        _, said = process.communicate(timeout=20)
        assert process.returncode == -signal.SIGABRT
        assert "Fatal Python error: Aborted" in said


def test_a_rank_that_leaves_or_dies_takes_its_reaper_along() -> None:
    for does, code in (("close", 0), ("nothing", 0), ("beat", -signal.SIGKILL)):
        with rank(does) as (process, reaper):
            if does == "beat":
                process.kill()
            assert process.wait(10) == code
            reaper.wait(5)


def test_a_job_that_is_suspended_as_a_whole_goes_on() -> None:
    with rank("beat") as (process, reaper):
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(2)
        os.killpg(process.pid, signal.SIGCONT)
        time.sleep(1.5)
        assert process.poll() is None
        assert reaper.is_running()
