"""Workers of a loader: how many there are, and what is said of those that fail, die or hang."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal

import pytest
import torch
from pretended import pretended_rank
from ranks import run_ranks
from torch.utils.data import Dataset, Subset, TensorDataset

import unitrain
from unitrain import CommunicationError, DataError
from unitrain.data.workers import default_workers, with_defaults

HOROVOD = pytest.mark.skipif(find_spec("horovod") is None, reason="horovod is not installed")


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
        strategy.sum(batch.sum())  # where the others wait
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
        r"DataLoader worker.*(killed by signal: Killed|exited unexpectedly|died)|rank 1 .*left with exit code 1",
        id="dies",
    ),
    pytest.param(hang, {"timeout": 1}, DataError, "no batch came from the loader's workers for 1 s", id="hangs"),
]


@pytest.mark.parametrize("launcher", ["spawn", pytest.param("horovodrun", marks=HOROVOD)])
@pytest.mark.parametrize(("fail", "settings", "error", "message"), FAILURES)
def test_a_failed_worker_ends_the_job_with_its_own_message(
    fail: Callable[[], object],
    settings: dict[str, Any],
    error: type[Exception] | tuple[type[Exception], ...],
    message: str,
    launcher: Literal["spawn", "horovodrun"],
) -> None:
    with pytest.raises(error, match=message):
        run_ranks(read, fail, settings, nprocs=2, launcher=launcher)


def test_errors_of_the_dataset_s_own_pass_as_they_are() -> None:
    def fail() -> None:
        raise RuntimeError("out of ideas")

    loader = pretended_rank().dataloader(Failing(fail), batch_size=4)
    with pytest.raises(RuntimeError, match=r"^out of ideas$"):
        list(loader)


def test_by_default_only_a_gpu_has_workers() -> None:
    strategy = pretended_rank(0, 2)
    cores = min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // 2)
    data = Failing(raise_error)
    assert default_workers(data, strategy, 8) == 0
    strategy.device = torch.device("cuda")
    assert default_workers(data, strategy, 8) == max(0, min(cores - 1, 8))
    assert default_workers(data, strategy, 0) == 0
    in_memory = TensorDataset(torch.zeros(3))
    assert default_workers(in_memory, strategy, 8) == default_workers(Subset(in_memory, [0]), strategy, 8) == 0


def test_defaults_give_way_to_what_was_given() -> None:
    strategy = pretended_rank(timeout_s=100, pin_memory=True)
    data = Failing(raise_error)
    assert with_defaults({}, data, strategy, most_workers=8) == {"num_workers": 0, "pin_memory": True}
    filled = with_defaults({"num_workers": 2, "pin_memory": None}, data, strategy, most_workers=8)
    del filled["worker_init_fn"]  # ours, which calls the user's
    assert filled == {"num_workers": 2, "pin_memory": True, "timeout": 50}
    given = {"num_workers": 2, "pin_memory": False, "timeout": 3}
    taken = with_defaults(given, data, strategy, most_workers=8)
    del taken["worker_init_fn"]
    assert taken == given
