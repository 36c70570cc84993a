"""``unitrain.spawn``: it starts ranks of this script, and tells what they raise."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked_python
import psutil
import pytest
import torch

import unitrain
from unitrain.errors import UsageError

SCRIPT = """
import os, sys, time, torch, unitrain
from unitrain import spawn

def main(folder, what):
    rank = os.environ["RANK"]
    if what == "raise" and rank == "1":
        raise ValueError("on purpose")
    if what == "mistake":
        unitrain.init().all_reduce([rank])
    if what == "hang":
        strategy = unitrain.init(backend="ddp", device="cpu", timeout_s=1)
        if rank == "1":
            time.sleep(600)
        torch.distributed.barrier()  # whose error names no rank
    if what == "wait":
        open(f"{folder}/{os.getpid()}", "w").close()
        time.sleep(600)
    open(f"{folder}/rank{rank}of{os.environ['WORLD_SIZE']}", "w").close()

if __name__ == "__main__":
    spawn(main, *sys.argv[1:], nprocs=2)
"""


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "out").mkdir()
    return forked_python.command(str(tmp_path / "script.py"), str(tmp_path / "out"))


def test_spawn_tells_of_a_mistake_without_frames_of_the_library(script: list[str]) -> None:
    run = subprocess.run([*script, "mistake"], timeout=60, capture_output=True, text=True)
    assert run.returncode == 1
    told = [line for line in run.stderr.splitlines() if "stopped because" not in line]  # the other rank's, if it can
    assert told[0] == "unitrain: error: all_reduce takes a tensor, not list: wrap it in torch.tensor(...)."
    assert re.fullmatch(r"  at \S+script\.py:10: unitrain\.init\(\)\.all_reduce\(\[rank\]\) \(rank \d\)", told[1])
    assert len(told) == 2


def test_the_rank_that_others_wait_for_is_named_before_all_end(script: list[str]) -> None:
    run = subprocess.run([*script, "hang"], timeout=60, capture_output=True, text=True)
    assert run.returncode == 1
    assert re.search(r"stopped because rank 1 on \S+ \(pid \d+\) did not reach the call that rank 0", run.stderr), (
        run.stderr
    )


@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_ranks_end_with_their_parent(script: list[str], end: signal.Signals) -> None:
    # A shell's background jobs are started deaf to SIGINT, and so are these tests where they are one.
    hearing = ["env", "--default-signal=INT", *script, "wait"]
    parent = subprocess.Popen(hearing, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while len(pids := [int(path.name) for path in Path(script[-1]).iterdir()]) < 2:
            assert time.monotonic() < until
            assert parent.poll() is None
            time.sleep(0.05)
        ranks = [psutil.Process(pid) for pid in pids]
        parent.send_signal(end)
        assert parent.wait(30) != 0
        assert psutil.wait_procs(ranks, timeout=10)[1] == []
    finally:
        parent.kill()
        parent.wait()


def test_spawn_needs_to_know_how_many() -> None:
    if torch.cuda.device_count() == 0:
        with pytest.raises(UsageError, match="pass nprocs=N"):
            unitrain.spawn(time.time)
    with pytest.raises(UsageError, match="nprocs is 0"):
        unitrain.spawn(time.time, nprocs=0)


@pytest.mark.parametrize(
    "how", ["stdin", *(pytest.param(how, marks=pytest.mark.soak) for how in ("typed in", "imported"))]
)
def test_spawn_from_no_file(how: str) -> None:
    own = "import unitrain\ndef f():\n    return 1\nif __name__ == '__main__':\n    unitrain.spawn(f, nprocs=2)\n"
    imported = "import time, unitrain; unitrain.spawn(time.time, nprocs=2)"
    command = {"stdin": ["-"], "typed in": ["-c", own], "imported": ["-c", imported]}[how]
    done = subprocess.run(
        [sys.executable, *command], input=own, capture_output=True, text=True, timeout=60, check=False
    )
    if how == "imported":
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0
        assert "put the function into a file, and import it from there" in done.stderr
        assert "Traceback" not in done.stderr
