"""``run_ranks`` of ``unitrain.testing``, which starts each job in new processes, and that of the tests."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from needs import HOROVOD
from ranks import run_ranks

from unitrain.errors import CommunicationError, ConfigError, UnitrainError
from unitrain.launch.detect import detect
from unitrain.launch.rendezvous import rendezvous
from unitrain.testing.ranks import run_ranks as start_ranks

pytestmark = pytest.mark.check
EITHER = pytest.mark.parametrize("start", [run_ranks, start_ranks])
Start = Callable[..., list[object]]


def begin() -> int:
    launch = detect(os.environ)
    dist.init_process_group("gloo", store=rendezvous(launch, 30), rank=launch.rank, world_size=launch.world_size)
    return launch.rank


def sum_of_ranks(*addends: int) -> tuple[int, int, str | None]:
    rank = begin()
    tensor = torch.tensor(rank + sum(addends))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return rank, int(tensor), os.environ.get("SET_BY_A_TEST")


@EITHER
def test_every_rank_returns_in_the_environment_of_the_moment(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "yes"):
        if value is not None:
            monkeypatch.setenv("SET_BY_A_TEST", value)
        assert start(sum_of_ranks, 10, nprocs=3) == [(rank, 33, value) for rank in range(3)]


class TwoArgumentsError(Exception):
    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


def fail_on_rank_1(kind: str) -> None:
    if begin() == 1:
        print("rank 1 says something first")
        if kind == "ConfigError":
            raise ConfigError("no such thing")
        if kind == "unpicklable":
            raise TwoArgumentsError("this", "can't be unpickled")
        if kind == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "crash":
            ctypes.string_at(0)
        os._exit(0)
    dist.barrier()  # fails or waits, by the way that rank 1 went


@EITHER
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("ConfigError", ConfigError, "no such thing"),
        ("unpicklable", UnitrainError, "TwoArgumentsError: this: can't be unpickled"),
        ("SIGKILL", CommunicationError, r"rank 1 \(pid \d+\) was killed by SIGKILL"),
        ("crash", CommunicationError, r"rank 1 \(pid \d+\) was killed by SIGSEGV"),
        ("_exit", CommunicationError, r"rank 1 \(pid \d+\) exited with code 0 before it had finished"),
    ],
)
def test_first_failing_rank_is_the_one_reported(
    start: Start, kind: str, error: type[Exception], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=message) as raised:
        start(fail_on_rank_1, kind)
    shown = str(raised.value.__cause__) + capfd.readouterr().out
    if kind in ("ConfigError", "unpicklable"):
        assert "rank 1: Traceback" in shown
    if kind != "SIGKILL":
        assert "---- rank 1 ----\nrank 1 says something first\n" in shown
    if kind == "crash":
        assert "Fatal Python error: Segmentation fault" in shown
    assert kind in ("SIGKILL", "_exit") or "in fail_on_rank_1" in shown


def leave() -> None:
    sys.exit(7 if os.environ["RANK"] == "1" else 0)


@EITHER
def test_exit_code_of_a_rank(start: Start) -> None:
    with pytest.raises(SystemExit) as raised:
        start(leave)
    assert raised.value.code == 7


def hang_on_rank_1() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if detect(os.environ).rank == 1:
        time.sleep(600)


@pytest.mark.soak
@EITHER
def test_deadline(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TimeoutError, match=r"did not end in time: \[1\]"):
        start(hang_on_rank_1, timeout=8)
    assert "in hang_on_rank_1" in capfd.readouterr().out


def place() -> tuple[str, int, int]:
    launch = detect(os.environ)
    return launch.launcher, launch.rank, launch.world_size


def test_a_process_that_nobody_launched() -> None:
    assert start_ranks(place, nprocs=1, launcher="python") == [("python", 0, 1)]


@pytest.mark.soak
@pytest.mark.launcher
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", pytest.param("horovodrun", marks=HOROVOD)])
def test_real_launchers_start_the_ranks(launcher: str) -> None:
    assert start_ranks(place, launcher=launcher) == [(launcher, 0, 2), (launcher, 1, 2)]
