"""A job of submitit that gets its signal stops on all ranks, saves, and only then is requeued, by submitit."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from jobs import run_job
from places import ROOT

from unitrain.job.watch.stopping import StopSignals

ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
TRAIN = """
import pathlib, time
import torch, unitrain

def main():
    strategy = unitrain.init(device="cpu", backend="ddp", timeout_s=60)
    model = strategy.prepare(torch.nn.Linear(2, 1))
    checkpoint = strategy.checkpoint("checkpoints", model=model)
    if not checkpoint.resume():
        optimizer = strategy.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        while True:
            strategy.step(model(torch.full((1, 2), strategy.rank + 1.0)).sum(), optimizer)
            pathlib.Path("step").write_text(str(strategy.global_step))
            time.sleep(0.02)
    strategy.close()
    return strategy.global_step
"""
# As by SLURM, each task is signalled once it trains: with SIGTERM first if the job is preempted.
PREEMPT = """
import os, pathlib, signal, time
import psutil
while not (os.path.exists("step") and pathlib.Path("step").read_text() > "3"):
    time.sleep(0.05)
for number in (signal.SIGTERM, signal.SIGUSR2):
    for task in psutil.Process(job._process.pid).children():
        task.send_signal(number)
    time.sleep(0.2)
print(job.results())
"""


@pytest.mark.soak
def test_a_job_of_submitit_is_saved_and_then_requeued(tmp_path: Path) -> None:
    """The documented example, on this host; under SLURM, too, submitit requeues the job."""
    page = (ROOT / "docs" / "guide" / "reliability.md").read_text()
    [example] = re.findall(r"```python\n(import submitit\n.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "driver.py").write_text(example.replace('("logs")', '("logs", cluster="local")') + PREEMPT)
    job = run_job([sys.executable, "driver.py"], tmp_path, environ={"CUDA_VISIBLE_DEVICES": ""}, deadline=150)
    logs = "".join(path.read_text() for path in sorted((tmp_path / "logs").glob("*_log.*")))
    assert job.code == 0, job.output + logs
    [(step, folder)] = re.findall(r"unitrain: stopped by SIGUSR2 after step (\d+) and saved in (\S+)\.", logs)
    assert folder.endswith(f"step-{int(step):010d}")
    assert job.stdout.splitlines()[-1] == str([int(step)] * 2)
    assert "Bypassing signal SIGTERM" in logs
    assert len(re.findall(r"Requeued job \d+", logs)) == 1
    assert not job.left


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (*ALL, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_other_handlers_are_left_in_place(handlers: None) -> None:
    got: list[int] = []

    class SignalHandler:
        """Called as submitit's, but of another library."""

        def checkpoint_and_try_requeue(self, number: int, frame: FrameType | None) -> None:
            got.append(number)

    mine = SignalHandler().checkpoint_and_try_requeue
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, mine)
    requested: list[int] = []
    signals = StopSignals(requested.append)
    assert signals.resubmit == {}
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        os.kill(os.getpid(), number)
    signals.close()
    assert got == [signal.SIGUSR1, signal.SIGUSR2]
    assert requested == []


def test_nothing_is_left_of_signals_that_the_script_handles(handlers: None) -> None:
    for number in ALL:
        signal.signal(number, lambda number, frame: None)
    StopSignals(lambda number: None).close()
    assert signal.set_wakeup_fd(-1) == -1
    assert "unitrain signals" not in [thread.name for thread in threading.enumerate()]


def test_submitit_s_signal_is_the_one_that_it_was_set_to(handlers: None, tmp_path: Path) -> None:
    from submitit.core.job_environment import SignalHandler
    from submitit.core.utils import DelayedSubmission, JobPaths
    from submitit.local.local import LocalJobEnvironment

    handler = SignalHandler(LocalJobEnvironment(), JobPaths(tmp_path), DelayedSubmission(len, "")).checkpoint_and_exit
    signal.signal(signal.SIGUSR1, handler)
    requested: list[int] = []
    signals = StopSignals(requested.append)
    assert signals.resubmit == {signal.SIGUSR1: handler}
    os.kill(os.getpid(), signal.SIGUSR1)
    deadline = time.monotonic() + 30
    while not requested and time.monotonic() < deadline:
        time.sleep(0.01)
    signals.close()
    assert requested == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) == handler
