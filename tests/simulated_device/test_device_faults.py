"""Ranks that hang, die, are stopped or end while the simulated accelerator has work: no rank is left waiting."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from on_device import NEEDS_COMPILER, environment, run
from torch import nn
from torch.utils.data import TensorDataset

import unitrain
from unitrain import CommunicationError, Strategy

pytestmark = NEEDS_COMPILER


def train(
    strategy: Strategy, folder: Path | None = None, fault: Callable[[], object] = lambda: None
) -> tuple[int, list[float]]:
    """Train for ten steps, with a fault in rank 1 before its fourth. Return the number of steps, and the weights."""
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    model, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    data = TensorDataset(torch.arange(160).view(40, 4) / 160)
    train = strategy.dataloader(data, global_batch_size=4, num_workers=0)
    checkpoint = folder and strategy.checkpoint(folder, model=model, optimizer=optimizer, train=train)
    if checkpoint:
        checkpoint.resume()
    for _ in train.epochs(1):
        for (inputs,) in train:
            if strategy.global_step == 3 and strategy.rank == 1:
                fault()
            strategy.step(model(inputs).square().mean(), optimizer)
    weights = [strategy.full_tensor(parameter.detach()).flatten() for parameter in model.parameters()]
    return strategy.global_step, torch.cat(weights).tolist()


def open_strategy(timeout_s: float = 2, backend: str = "ddp", **settings: Any) -> Strategy:
    return unitrain.init(backend=backend, device="sim", timeout_s=timeout_s, **settings)


def hangs() -> None:
    with open_strategy() as strategy:
        train(strategy, fault=lambda: time.sleep(1000))


def test_a_rank_that_joins_no_collective_ends_the_job_though_the_others_devices_wait(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises((CommunicationError, SystemExit)):
        run(hangs, nprocs=2, timeout=100)
    output = capfd.readouterr().out
    assert "rank 1" in output, output
    assert "watchdog" not in output, "the job's watch reports the reason before the library's watchdog aborts"


def stops(folder: Path) -> None:
    with open_strategy(60) as strategy:
        train(strategy, folder, fault=lambda: os.kill(os.getpid(), signal.SIGTERM))


def goes_on(folder: Path) -> int:
    with open_strategy(60) as strategy:
        return train(strategy, folder)[0]


def test_a_signal_stops_all_ranks_after_the_same_step_with_a_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(stops, tmp_path, nprocs=2)
    assert ended.value.code == 143
    assert "stopped by SIGTERM after step" in capfd.readouterr().out
    assert run(goes_on, tmp_path, nprocs=2) == [10, 10]


def is_copied(folder: Path, backend: str, killed: bool) -> list[float]:
    """Train with a copy in memory every two steps. Rank 1 may be killed when the first is complete."""

    def fault() -> None:
        writers = 2 if backend == "fsdp" else 1
        while killed and len(list(folder.glob("memory/*/step-0000000002.1/rank-*.json"))) < writers:
            time.sleep(0.01)
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)

    with open_strategy(60, backend, memory_copies={"every": 2, "folder": str(folder / "memory")}) as strategy:
        return train(strategy, folder / "run", fault)[1]


@pytest.mark.parametrize("backend", ["ddp", pytest.param("fsdp", marks=pytest.mark.soak)])
def test_a_run_whose_rank_was_killed_resumes_from_its_copy_in_memory(
    backend: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CommunicationError, match=r"rank 1 .* was killed by SIGKILL"):
        run(is_copied, tmp_path / "killed", backend, True, nprocs=2, timeout=200)
    resumed = run(is_copied, tmp_path / "killed", backend, False, nprocs=2, timeout=100)
    assert "resumed after step 2" in "".join(capfd.readouterr())
    assert resumed == run(is_copied, tmp_path / "undisturbed", backend, False, nprocs=2)


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_unitrain_verify_passes_on_the_device(backend: str, tmp_path: Path) -> None:
    """Under every launcher, in programs that import torch themselves."""
    command = [sys.executable, "-m", "unitrain.commands.cli", "verify", "--device", "sim", "--backend", backend]
    job = run_job(command, tmp_path, environ=environment(devices=3), deadline=280)
    assert job.code == 0, job.output
