"""DataLoader workers: their default number, and messages for those that fail, die or hang."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from jobs import run_job
from needs import GPU
from pretended import pretended_rank
from ranks import run_ranks
from torch.utils.data import Dataset, Subset, TensorDataset

import unitrain
from unitrain import CommunicationError, DataError
from unitrain.config import StrategyConfig
from unitrain.data.reading.workers import default_workers, with_defaults


class Failing(Dataset[int]):
    """Sample 13 is not read as the others are."""

    def __init__(self, fail: Callable[[], object]) -> None:
        self.fail = fail

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index == 13:
            self.fail()
        return index


CPU = torch.device("cpu")


def raise_error() -> None:
    raise OSError("13.jpg is truncated")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    threading.Event().wait()


def read(fail: Callable[[], object], settings: dict[str, Any]) -> int:
    """Read on every rank; sample 13 is rank 1's of two."""
    strategy = unitrain.init(timeout_s=60)
    loader = strategy.dataloader(Failing(fail), batch_size=2, num_workers=1, multiprocessing_context="fork", **settings)
    for batch in loader:
        strategy.all_reduce(batch.sum())  # where the others wait
    return strategy.rank


FAILURES = [
    pytest.param(
        raise_error, {}, OSError, r"(?s)worker process 0.*raise_error.*OSError: 13.jpg is truncated", id="raises"
    ),
    pytest.param(
        # Torch notices by a signal, and raises wherever that finds the process: in the loader (DataError), at work, or
        # even while the rank hands its error over, and is then known by its exit code only.
        die,
        {},
        (DataError, RuntimeError, CommunicationError),
        r"DataLoader worker.*(killed by signal: Killed|exited unexpectedly|died)|rank 1 .*exited with code 1",
        id="dies",
    ),
    pytest.param(hang, {"timeout": 1}, DataError, "the loader's workers returned no batch for 1 s", id="hangs"),
]


@pytest.mark.parametrize(("fail", "settings", "error", "message"), FAILURES)
def test_a_failed_worker_ends_the_job_with_its_own_message(
    fail: Callable[[], object],
    settings: dict[str, Any],
    error: type[Exception] | tuple[type[Exception], ...],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        run_ranks(read, fail, settings, nprocs=2)


class Pids(Dataset[int]):
    """Every sample is the number of the process that reads it, which may not come back from the last one."""

    def __init__(self, hang: Callable[[], object] = lambda: None) -> None:
        self.hang = hang

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index == 39:
            self.hang()
        return os.getpid()


def read_under_signals(context: str) -> tuple[int, float]:
    strategy = unitrain.init(timeout_s=60)
    settings: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": context, "prefetch_factor": 1}
    pids: set[int] = set()
    samples = 0
    for batch in strategy.dataloader(Pids(), batch_size=1, **settings):
        if len(pids) == 2:
            # As a launcher or a scheduler does it, which is no parent of the workers.
            number = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)[samples % 3]
            subprocess.run(["sh", "-c", f"kill -{number:d} {' '.join(map(str, pids))}"], check=True)
        pids |= set(batch.tolist())
        samples += 1
    began = time.monotonic()
    for pid in pids:  # they end with their loader
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(30)
    return samples, time.monotonic() - began


def test_a_signal_to_the_whole_job_leaves_the_workers_to_their_process() -> None:
    [(samples, seconds)] = run_ranks(read_under_signals, "fork", nprocs=1)
    assert samples == 40
    assert seconds < 4.0  # torch terminates those that have not ended after 5 s


def test_workers_end_with_a_process_that_does_not_end_them(tmp_path: Path) -> None:
    script = """
import os, threading, unitrain
class Data:
    def __len__(self): return 3
    def __getitem__(self, index):
        if index == 2: threading.Event().wait()
        return index
strategy = unitrain.init(backend="single")
workers = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
batches = iter(strategy.dataloader(Data(), batch_size=1, **workers))
next(batches)
"""
    (tmp_path / "script.py").write_text(script)
    began = time.monotonic()
    job = run_job([sys.executable, "script.py"], tmp_path)
    assert (job.code, job.stderr, job.left) == (0, "", ())
    assert time.monotonic() - began < 30


def disturb(number: int, timeout: float) -> str:
    """Send a worker a signal, ask for no batch meanwhile, and return the error."""
    strategy = unitrain.init(backend="single", device="cpu")
    settings: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork", "timeout": timeout}
    batches = iter(strategy.dataloader(Pids(), batch_size=1, **settings))
    try:
        os.kill(int(next(batches)), number)
        for _ in range(300):
            time.sleep(0.01)
    except DataError as error:
        return str(error)
    finally:
        strategy.close()
    return ""


def disturbed_workers() -> list[str]:
    return [disturb(signal.SIGKILL, 60), disturb(signal.SIGSTOP, 1), disturb(signal.SIGUSR1, 1)]


def test_a_worker_that_is_killed_or_stopped_is_named_wherever_its_process_is() -> None:
    [(killed, stopped, nothing)] = run_ranks(disturbed_workers, nprocs=1, fresh=True)
    assert re.search(r"worker \(pid \d+\) is killed by signal: Killed\. The usual reason .*: use fewer workers", killed)
    assert re.search(r"worker \d+ was stopped \(SIGSTOP\), .* or pass a larger timeout=", stopped)
    assert not nothing


def test_errors_of_the_dataset_s_own_pass_as_they_are() -> None:
    def fail() -> None:
        raise RuntimeError("out of ideas")

    loader = pretended_rank().dataloader(Failing(fail), batch_size=4)
    with pytest.raises(RuntimeError, match=r"^out of ideas$"):
        list(loader)


def test_by_default_only_a_gpu_has_workers() -> None:
    cores = min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // 2)
    data = Failing(raise_error)
    assert default_workers(data, CPU, 2, 8) == 0
    gpu = torch.device("cuda")
    assert default_workers(data, gpu, 2, 8) == max(0, min(cores - 1, 8))
    assert default_workers(data, gpu, 2, 0) == 0
    in_memory = TensorDataset(torch.zeros(3))
    assert default_workers(in_memory, gpu, 2, 8) == default_workers(Subset(in_memory, [0]), gpu, 2, 8) == 0


def test_by_default_only_what_workers_read_for_a_gpu_is_pinned() -> None:
    """What the process reads itself may be on the GPU already."""
    most: dict[str, Any] = {"local_world_size": 1, "most_workers": 8}
    gpu = torch.device("cuda")

    def pinned(num_workers: int, device: torch.device, **settings: Any) -> Any:
        data, config = Failing(raise_error), StrategyConfig(**settings)
        return with_defaults({"num_workers": num_workers}, data, device, config, **most)["pin_memory"]

    assert [pinned(0, gpu), pinned(2, gpu), pinned(2, CPU)] == [False, True, False]
    assert [pinned(0, gpu, pin_memory=True), pinned(2, gpu, pin_memory=False)] == [True, False]
    rows = TensorDataset(torch.zeros(3))
    assert with_defaults({}, rows, gpu, StrategyConfig(), **most) == {"num_workers": 0, "pin_memory": False}


@pytest.mark.gpu
@GPU
def test_samples_that_are_on_the_gpu_are_read() -> None:
    rows = TensorDataset(torch.arange(10, device="cuda"))
    with unitrain.init(backend="single", device="cuda") as strategy:
        assert sorted(x for (batch,) in strategy.dataloader(rows, batch_size=4) for x in batch.tolist()) == [*range(10)]


def test_defaults_give_way_to_what_was_given() -> None:
    config = StrategyConfig(timeout_s=100, pin_memory=True)
    most = {"local_world_size": 1, "most_workers": 8}
    data = Failing(raise_error)
    assert with_defaults({}, data, CPU, config, **most) == {"num_workers": 0, "pin_memory": True}
    filled = with_defaults({"num_workers": 2, "pin_memory": None}, data, CPU, config, **most)
    del filled["worker_init_fn"]  # ours, which calls the user's
    assert filled == {"num_workers": 2, "pin_memory": True, "timeout": 50}
    given = {"num_workers": 2, "pin_memory": False, "timeout": 3}
    taken = with_defaults(given, data, CPU, config, **most)
    del taken["worker_init_fn"]
    assert taken == given
