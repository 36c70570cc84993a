"""A job that gets SLURM's SIGUSR1 shortly before its time limit saves a checkpoint and requeues itself, once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import PROGRAM, notes, saved
from slurm import Slurm


def wait_until(condition: Callable[[], object], what: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"{what}\n{log.read_text() if log.exists() else ''}"
        time.sleep(0.1)


@pytest.mark.launcher
@pytest.mark.xdist_group("slurm")
@pytest.mark.parametrize("array", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_job_is_saved_and_requeued_once(slurm: Slurm, array: bool, tmp_path: Path) -> None:
    script, log = tmp_path / "job.sh", tmp_path / "job.log"
    script.write_text(f"#!/bin/sh\nexec srun --overlap -n 2 {sys.executable} {PROGRAM} {tmp_path} 1000 none:0:0\n")
    command = ["sbatch", "--parsable", "--requeue", "-n", "2", "--open-mode=append", f"--output={log}"]
    environ = {**slurm.env, "TESTS_PAUSE": "0.1", "UNITRAIN_BACKEND": "ddp"}
    made = subprocess.run(
        [*command, *(["--array=3-3"] if array else []), str(script)],
        env=environ, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    job = made.stdout.strip() + ("_3" if array else "")

    def shown() -> str:
        run = subprocess.run(
            ["scontrol", "show", "job", job], env=slurm.env, capture_output=True, text=True, check=True, timeout=60
        )
        return run.stdout

    try:
        wait_until(lambda: any(note["step"] > 3 for note in notes(tmp_path)), "it did not train", log)
        assert "Restarts=0" in shown()
        subprocess.run(["scancel", "--signal=USR1", job], env=slurm.env, check=True, timeout=60)
        wait_until(lambda: "Restarts=1" in shown(), "it was not requeued", log)
        wait_until(lambda: "JobState=RUNNING" not in shown(), "it goes on", log)
        assert "Restarts=1" in shown(), "once"
    finally:
        subprocess.run(["scancel", job], env=slurm.env, check=False, timeout=60)
    said = re.findall(
        r"stopped by SIGUSR1 after step (\d+) and saved in (\S+)\. SLURM has requeued job (\S+)\.", log.read_text()
    )
    assert len(said) == 1, log.read_text()
    step, folder, requeued = said[0]
    assert requeued == job
    assert folder.endswith(saved(tmp_path)[-1])
    assert int(step) == int(saved(tmp_path)[-1].removeprefix("step-").partition(".")[0])
    assert not [name for name in os.listdir(tmp_path / "checkpoints") if name.endswith(".tmp")]
