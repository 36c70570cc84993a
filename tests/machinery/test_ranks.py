"""``run_ranks`` of the tests, and that of ``unitrain.testing``, which starts each job in new processes."""

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

import unitrain
from unitrain.errors import CommunicationError, ConfigError
from unitrain.launch.detect import detect
from unitrain.launch.rendezvous import rendezvous
from unitrain.testing.ranks import run_ranks as start_ranks

pytestmark = pytest.mark.check


def sum_of_ranks(*addends: int) -> tuple[int, int]:
    launch = detect(os.environ)
    dist.init_process_group("gloo", store=rendezvous(launch, 30), rank=launch.rank, world_size=launch.world_size)
    tensor = torch.tensor(launch.rank + sum(addends))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return launch.rank, int(tensor)


def test_every_rank_returns() -> None:
    assert run_ranks(sum_of_ranks, 10, nprocs=3) == [(0, 33), (1, 33), (2, 33)]


def places() -> tuple[str, int, int, int, int, int | None]:
    launch = detect(os.environ)
    return (
        launch.launcher,
        launch.rank,
        launch.world_size,
        launch.local_rank,
        launch.local_world_size,
        launch.node_rank,
    )


def test_ranks_are_told_their_place() -> None:
    assert run_ranks(places) == [("spawn", 0, 2, 0, 2, 0), ("spawn", 1, 2, 1, 2, 0)]


def environment_of_the_moment() -> str | None:
    return os.environ.get("SOMETHING_SET_BY_A_TEST")


def test_ranks_have_the_environment_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(environment_of_the_moment) == [None, None]
    monkeypatch.setenv("SOMETHING_SET_BY_A_TEST", "yes")
    assert run_ranks(environment_of_the_moment) == ["yes", "yes"]


class TwoArgumentsError(Exception):
    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


def fail_on_rank_1(kind: str) -> None:
    launch = detect(os.environ)
    dist.init_process_group("gloo", store=rendezvous(launch, 30), rank=launch.rank, world_size=launch.world_size)
    if launch.rank == 1:
        print("rank 1 says something first")
        if kind == "ConfigError":
            raise ConfigError("no such thing")
        if kind == "unpicklable":
            raise TwoArgumentsError("this", "can't be unpickled")
        if kind == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "_exit":
            os._exit(0)
        if kind == "exit":
            sys.exit(7)
    dist.barrier()  # fails or waits, by the way that rank 1 went


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("ConfigError", ConfigError, "no such thing"),
        ("unpicklable", unitrain.UnitrainError, "TwoArgumentsError: this: can't be unpickled"),
        ("SIGKILL", CommunicationError, r"rank 1 \(pid \d+\) was killed by SIGKILL"),
        ("_exit", CommunicationError, r"rank 1 \(pid \d+\) exited with code 0 before it had finished"),
    ],
)
def test_first_failing_rank_is_the_one_reported(
    kind: str, error: type[Exception], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=message) as raised:
        run_ranks(fail_on_rank_1, kind)
    if kind in ("ConfigError", "unpicklable"):
        assert "rank 1: Traceback" in str(raised.value.__cause__)
        assert "in fail_on_rank_1" in str(raised.value.__cause__)
    if kind != "SIGKILL":
        assert "---- rank 1 ----\nrank 1 says something first\n" in capfd.readouterr().out


def crash_on_rank_1() -> None:
    if detect(os.environ).rank == 1:
        ctypes.string_at(0)
    time.sleep(60)


@pytest.mark.parametrize("start", [run_ranks, start_ranks])
def test_a_crash_shows_where_it_was(start: Callable[..., object], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommunicationError, match=r"rank 1 \(pid \d+\) was killed by SIGSEGV"):
        start(crash_on_rank_1)
    out = capfd.readouterr().out
    assert "Fatal Python error: Segmentation fault" in out
    assert "in crash_on_rank_1" in out


def leave() -> None:
    sys.exit(7 if os.environ["RANK"] == "1" else 0)


def test_exit_code_of_a_rank() -> None:
    with pytest.raises(SystemExit) as raised:
        run_ranks(leave)
    assert raised.value.code == 7


def hang_on_rank_1() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if detect(os.environ).rank == 1:
        time.sleep(600)


@pytest.mark.soak
def test_deadline(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TimeoutError, match=r"did not end in time: \[1\]"):
        run_ranks(hang_on_rank_1, timeout=8)
    assert "in hang_on_rank_1" in capfd.readouterr().out


def test_a_process_that_nobody_launched() -> None:
    assert start_ranks(places, nprocs=1, launcher="python") == [("python", 0, 1, 0, 1, 0)]


@pytest.mark.soak
@pytest.mark.launcher
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("horovodrun", marks=HOROVOD)])
def test_real_launchers_start_the_ranks(launcher: str) -> None:
    found = start_ranks(places, launcher=launcher)
    assert [place[:3] for place in found] == [(launcher, 0, 2), (launcher, 1, 2)]


@pytest.mark.soak
@pytest.mark.launcher
def test_mpirun_with_a_failing_rank(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="mpirun exited with code 1"):
        run_ranks(fail_on_rank_1, "ConfigError", launcher="mpirun")
    assert "ConfigError: no such thing" in capsys.readouterr().out


@pytest.mark.soak
@pytest.mark.launcher
def test_mpirun_has_a_deadline() -> None:
    with pytest.raises(TimeoutError, match="did not end within 5 s"):
        run_ranks(hang_on_rank_1, launcher="mpirun", timeout=5)
