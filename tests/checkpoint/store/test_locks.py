"""One job saves to a folder or URL: a second one is told which, and what a job left that has ended is in no way."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from ranks import run_ranks
from saved_run import steps_in
from torch import nn

import unitrain
from unitrain import CheckpointError
from unitrain.checkpoint.store import lock
from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.lock import NAME, Lock
from unitrain.checkpoint.store.objects import Objects
from unitrain.checkpoint.store.store import Store

HOLDER = """
import sys, pathlib, unitrain
from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.lock import Lock
Lock(Disk(pathlib.Path(sys.argv[1])))
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Have another process hold the lock of a folder."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def second_job(folder: str) -> None:
    with unitrain.init(backend="ddp", device="cpu") as strategy:
        strategy.checkpoint(folder, model=nn.Linear(1, 1))


def test_a_second_job_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    with held(tmp_path) as process:
        said = rf"{tmp_path} is in use by process {process.pid} on {socket.gethostname()}: two jobs can't save"
        with pytest.raises(CheckpointError, match=said):
            run_ranks(second_job, str(tmp_path))
        assert json.loads((tmp_path / NAME).read_text())["pid"] == process.pid
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie, which its parent has not reaped
        assert (tmp_path / NAME).exists()
        run_ranks(second_job, str(tmp_path))
    assert os.listdir(tmp_path) == ["run.json"]


@pytest.mark.all("an interpreter")
def test_a_process_that_got_the_id_of_an_ended_one_is_another(tmp_path: Path) -> None:
    with held(tmp_path):
        holder = json.loads((tmp_path / NAME).read_text())
        (tmp_path / NAME).write_text(json.dumps({**holder, "started": holder["started"] - 1}))
        Lock(Disk(tmp_path)).release()


ELSEWHERE = {"host": "elsewhere", "pids": "pid:[1]", "pid": os.getpid(), "started": 0, "token": "a"}


def of_another_host(folder: Path) -> Path:
    """Write a lock as a process of another host does."""
    path = folder / NAME
    path.write_text(json.dumps(ELSEWHERE))
    return path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.1)
    monkeypatch.setattr(lock, "STALE_S", 1.0)
    monkeypatch.setattr(lock, "_POLL_S", 0.05)


def test_a_process_of_another_host_that_was_silent_for_long_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = of_another_host(tmp_path)
    before = path.stat().st_mtime - lock.STALE_S - 1
    os.utime(path, (before, before))
    Lock(Disk(tmp_path)).release()
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_a_lock_of_a_time_ahead_is_waited_for_no_longer_than_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = of_another_host(tmp_path)
    ahead = path.stat().st_mtime + 3600
    os.utime(path, (ahead, ahead))
    Lock(Disk(tmp_path)).release()
    assert "is locked by process" in (said := capsys.readouterr().err)
    assert "Waiting for up to 1 s" in said


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("text", ["", "{", '{"pid": "1"}'])
def test_a_lock_that_can_not_be_read_is_taken_when_nobody_touches_it(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    Lock(Disk(tmp_path)).release()
    assert not (tmp_path / NAME).exists()


def test_a_lock_that_was_taken_is_not_given_back(tmp_path: Path) -> None:
    first = Lock(Disk(tmp_path))
    second = Lock(Disk(tmp_path))  # of the same process, whose first checkpoint was never closed
    with pytest.raises(CheckpointError, match=r"was taken by process \d+ on .* while this run was saving"):
        first.check()
    first.release()
    second.check()
    second.release()


Spoil = Callable[[Path], object]


def train(folder: Path, spoil: Spoil) -> list[int]:
    """Save, have something done to the folder, save again, and return the steps that are there."""
    with unitrain.init(backend="single", device="cpu") as strategy:
        model, optimizer = strategy.prepare(module := nn.Linear(1, 1), torch.optim.SGD(module.parameters(), lr=0.1))
        checkpoint = strategy.checkpoint(folder, model=model)
        for step in range(2):
            strategy.step(model(torch.ones(1, 1)).sum(), optimizer)
            checkpoint.save()
            checkpoint.wait()
            if not step:
                spoil(folder)
        return steps_in(folder)


def replace(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("in the way")


@pytest.mark.parametrize(
    ("spoil", "steps"),
    [
        (shutil.rmtree, [2]),
        (lambda folder: folder.rename(folder.with_name("moved")), [2]),
        (lambda folder: (folder / NAME).unlink(), [2, 1]),
    ],
    ids=["removed", "moved", "emptied"],
)
def test_a_folder_that_is_gone_is_made_again_and_reported(
    tmp_path: Path, spoil: Spoil, steps: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert train(folder, spoil) == steps
    assert f"{folder} was removed, moved or emptied while this run was going on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            replace,
            r"can't be written to .*/run: .*File exists: .* in .*/run\. Correct that, or use",
        ),
        (of_another_host, r"run was taken by process \d+ on elsewhere while this run was saving to it"),
    ],
)
def test_a_folder_that_others_use_now_is_refused(tmp_path: Path, spoil: Spoil, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        train(tmp_path / "run", spoil)


def test_a_disk_that_is_gone_is_not_replaced_by_the_one_below(small_disk: Path) -> None:
    (small_disk / "run").mkdir()
    held_here = Lock(Disk(small_disk / "run"))
    subprocess.run(["umount", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match=r"the disk of .*/run is no longer mounted"):
        held_here.check()
    assert not list(small_disk.iterdir())
    held_here.release()


def fail(folder: str) -> None:
    with unitrain.init(backend="single", device="cpu") as strategy:
        strategy.checkpoint(folder, model=nn.Linear(1, 1))
        raise ZeroDivisionError


def test_a_run_that_fails_leaves_no_lock(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        fail(str(tmp_path))
    assert os.listdir(tmp_path) == ["run.json"]


@pytest.fixture(params=["disk", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Disk(tmp_path) if request.param == "disk" else Objects(request.getfixturevalue("s3_url"))


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.3)
    monkeypatch.setattr(lock, "STALE_S", 2.5)  # S3 tells times in seconds
    monkeypatch.setattr(lock, "_POLL_S", 0.05)


def test_of_jobs_that_start_at_the_same_time_the_server_lets_in_one(s3_url: str) -> None:
    files = Objects(s3_url)

    def create(number: int) -> bool:
        try:
            files.put(NAME, str(number).encode(), exclusive=True)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(create, range(8))) == 1


@pytest.mark.usefixtures("seconds", "server")
def test_a_job_of_another_host_runs_if_it_writes_its_lock_again(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    text, ended = json.dumps(ELSEWHERE).encode(), threading.Event()
    store.put(NAME, text)

    def beat() -> None:
        while not ended.wait(0.3):
            store.put(NAME, text)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(CheckpointError, match=rf"in use by process {os.getpid()} on elsewhere"):
        Lock(store)
    ended.set()
    thread.join()
    assert "s to see whether that process is still running" in capsys.readouterr().err
    held = Lock(store)
    written = store.modified(NAME)
    for _ in range(100):
        if threading.Event().wait(0.1) or store.modified(NAME) > written:
            break
    assert store.modified(NAME) > written, "it writes its own again, too"
    held.release()
    with pytest.raises(FileNotFoundError):
        store.get(NAME)


class Commits(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Stands for a store where each write is a commit, which a lock must not make every few seconds."""

    protocol = "hf"


@pytest.mark.usefixtures("seconds")
def test_where_each_write_is_a_commit_a_lock_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_registry, "hf", Commits)
    files = Objects(f"hf://datasets/me/{uuid4().hex}")
    held = Lock(files)
    written = files.modified(NAME)
    assert not threading.Event().wait(1)
    assert files.modified(NAME) == written
    held.release()
    files.put(NAME, json.dumps(ELSEWHERE).encode())
    with pytest.raises(CheckpointError, match=rf"elsewhere: two jobs .*\. If it was killed, remove {files}/\.lock\."):
        Lock(files)
