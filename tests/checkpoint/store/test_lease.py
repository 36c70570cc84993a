"""One job saves to a folder: the server of an object store lets in one, and a silent one is replaced."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from unitrain import CheckpointError
from unitrain.checkpoint.store import lock
from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.lock import NAME, Lock
from unitrain.checkpoint.store.objects import Objects
from unitrain.checkpoint.store.store import Store

pytestmark = pytest.mark.usefixtures("server")

ELSEWHERE: dict[str, Any] = {"host": "elsewhere", "pids": "pid:[1]", "pid": os.getpid(), "started": 0, "token": "a"}


@pytest.fixture
def files(s3_url: str) -> Objects:
    return Objects(s3_url)


@pytest.fixture(params=["disk", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Disk(tmp_path) if request.param == "disk" else Objects(request.getfixturevalue("s3_url"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.3)
    monkeypatch.setattr(lock, "STALE_S", 2.5)  # S3 tells times in seconds
    monkeypatch.setattr(lock, "_POLL_S", 0.05)


def test_of_jobs_that_start_at_the_same_time_the_server_lets_in_one(files: Objects) -> None:
    def create(number: int) -> bool:
        try:
            files.put(NAME, str(number).encode(), exclusive=True)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(create, range(8))) == 1


@pytest.mark.usefixtures("quick")
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


@pytest.mark.usefixtures("quick")
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
