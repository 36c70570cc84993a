"""``run_ranks`` of the tests, and ``unitrain.spawn``, which start ranks in the same way."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import forked_python
import psutil
import pytest
import torch
import torch.distributed as dist
from needs import HOROVOD
from ranks import run_ranks

import unitrain
from unitrain.errors import CommunicationError, ConfigError, UsageError
from unitrain.launch.detect import detect
from unitrain.launch.rendezvous import rendezvous
from unitrain.testing.ranks import run_ranks as start_ranks


def sum_of_ranks(*addends: int) -> tuple[int, int]:
    launch = detect(os.environ)
    dist.init_process_group("gloo", store=rendezvous(launch, 30), rank=launch.rank, world_size=launch.world_size)
    tensor = torch.tensor(launch.rank + sum(addends))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return launch.rank, int(tensor)


def test_every_rank_returns() -> None:
    assert run_ranks(sum_of_ranks, 10, nprocs=3) == [(0, 33), (1, 33), (2, 33)]


def meet_twice() -> list[int]:
    return [sum_of_ranks()[1], sum_of_ranks()[1]]


def test_ranks_meet_again_after_they_parted() -> None:
    assert run_ranks(meet_twice) == [[1, 1], [1, 1]]


def env_rendezvous() -> int:
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    dist.barrier()  # a rank that leaves while another still connects makes that one fail
    dist.destroy_process_group()
    return world_size


def test_torch_alone_can_use_the_environment() -> None:
    assert run_ranks(env_rendezvous) == [2, 2]


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


def tensors() -> torch.Tensor:
    return torch.full((1000, 100), float(os.environ["RANK"]))


def test_large_results_come_back() -> None:
    first, second = run_ranks(tensors)
    assert torch.equal(second, first + 1)


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


@HOROVOD
def test_horovodrun_environment() -> None:
    assert run_ranks(places, launcher="horovodrun") == [("horovodrun", 0, 2, 0, 2, 0), ("horovodrun", 1, 2, 1, 2, 0)]
    assert run_ranks(horovod_sum, launcher="horovodrun", nprocs=3) == [3.0, 3.0, 3.0]
    assert run_ranks(meet_twice, launcher="horovodrun") == [[1, 1], [1, 1]]


def horovod_sum() -> float:
    import horovod.torch as hvd  # noqa: TID251

    hvd.init()
    total = hvd.allreduce(torch.tensor(float(hvd.rank())), op=hvd.Sum).item()
    hvd.shutdown()
    return float(total)


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
@HOROVOD
def test_mpirun_starts_the_ranks() -> None:
    assert run_ranks(horovod_sum, launcher="mpirun") == [1.0, 1.0]


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


# ------------------------------------------------------------------------------------------------ unitrain.spawn


SCRIPT = """
import os, sys, time, unitrain
from unitrain import spawn

def main(folder, what):
    rank = os.environ["RANK"]
    if what == "raise" and rank == "1":
        raise ValueError("on purpose")
    if what == "mistake":
        unitrain.init().all_reduce([rank])
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


@pytest.mark.soak
def test_spawn_from_a_script(script: list[str]) -> None:
    subprocess.run([*script, "work"], check=True, timeout=60)
    assert {path.name for path in Path(script[-1]).iterdir()} == {"rank0of2", "rank1of2"}


def test_spawn_raises_what_a_rank_raised(script: list[str]) -> None:
    run = subprocess.run([*script, "raise"], timeout=60, capture_output=True, text=True)
    assert run.returncode == 1
    assert "rank 1: Traceback" in run.stderr
    assert run.stderr.endswith("ValueError: on purpose\n")


def test_spawn_tells_of_a_mistake_without_frames_of_the_library(script: list[str]) -> None:
    run = subprocess.run([*script, "mistake"], timeout=60, capture_output=True, text=True)
    assert run.returncode == 1
    told = [line for line in run.stderr.splitlines() if "stopped because" not in line]  # the other rank's, if it can
    assert told[0] == "unitrain: error: all_reduce takes a tensor, not list: wrap it in torch.tensor(...)."
    assert re.fullmatch(r"  at \S+script\.py:10: unitrain\.init\(\)\.all_reduce\(\[rank\]\) \(rank \d\)", told[1])
    assert len(told) == 2


def test_spawn_needs_what_can_be_pickled() -> None:
    with pytest.raises(UsageError, match=r"pickles its function and arguments, and failed: .* Define the function"):
        unitrain.spawn(lambda: None, nprocs=2)


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
            unitrain.spawn(places)
    with pytest.raises(UsageError, match="nprocs is 0"):
        unitrain.spawn(places, nprocs=0)


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
