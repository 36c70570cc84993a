"""Checkpoints in object stores: the promise of those on a disk, on a real S3 server and on fsspec's own memory."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from ranks import run_ranks
from s3_server import S3Server
from saved_run import SavedRun, verify
from torch import nn

import unitrain
from unitrain import CheckpointError, Strategy, UsageError
from unitrain.checkpoint.store import objects as stores
from unitrain.checkpoint.store.folder import Folder
from unitrain.checkpoint.store.objects import Objects
from unitrain.checkpoint.store.store import NAME as MANIFEST

pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture(params=["s3", "memory"])
def url(request: pytest.FixtureRequest) -> str:
    """A URL of a folder that does not exist yet, in each store."""
    return str(request.getfixturevalue("s3_url")) if request.param == "s3" else f"memory://{uuid4().hex}"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of temporary files, in which nothing is left."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    get_temp_dir()  # of multiprocessing, which makes it where the first process is started, and uses it from then on
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not list(folder.iterdir())


def objects(url: str) -> list[str]:
    """Return the names of all objects below a URL, as another program sees them."""
    store, root = fsspec.url_to_fs(url)
    store.invalidate_cache()
    return sorted(path.removeprefix(root + "/") for path in store.find(root))


def drop(url: str) -> None:
    store, path = fsspec.url_to_fs(url)
    store.rm_file(path)


def put(url: str, data: bytes) -> None:
    store, path = fsspec.url_to_fs(url)
    store.pipe_file(path, data)


def get(url: str) -> bytes:
    store, path = fsspec.url_to_fs(url)
    return bytes(store.cat_file(path))


class Run(SavedRun):
    """A run, and what is found where it saves."""

    @property
    def folders(self) -> list[str]:
        names = objects(str(self.place))
        return sorted({name.partition("/")[0] for name in names if "/" in name}, reverse=True)


@pytest.mark.parametrize(("url", "background"), [("s3", True), ("memory", False)], indirect=["url"])
def test_a_run_is_saved_kept_and_resumed(strategy: Strategy, url: str, background: bool) -> None:
    run = Run(strategy, url, background=background)
    assert not run.checkpoint.resume()
    run.save(1).save(2, best=True).save(3, 4, 5)
    assert run.folders == ["step-0000000005", "step-0000000004", "step-0000000002"]
    whole = {f"step-0000000005/{name}" for name in ("model.pt", "notes.pt", "_run.pt", MANIFEST)}
    assert whole == {name for name in objects(url) if name.startswith("step-0000000005")}
    assert run.resumed() == 5
    assert run.resumed("best") == 2
    assert run.resumed(f"{url}/step-0000000004") == 4
    assert run.save(5).folders == ["step-0000000005", "step-0000000004", "step-0000000002"]
    run.checkpoint.close()
    assert ".lock" not in objects(url)

    again = Run(strategy, url, background=background)
    with pytest.raises(CheckpointError, match=rf"{url} contains checkpoints of another run, up to step-0000000005:"):
        again.checkpoint.wait()
    assert again.resumed() == 5
    again.checkpoint.discard()
    assert objects(url) == [".lock", "run.json"]
    assert not again.checkpoint.resume()


class Killed(BaseException):
    """Ends a save in its midst, and nothing is done after it."""


@pytest.mark.parametrize("step", [1, 2])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_one(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Another step, or the same again."""
    newest: list[int] = []
    survived = False
    while not survived:
        run = Run(strategy, f"memory://{uuid4().hex}", keep=1).save(1, best=True)
        left = len(newest)

        def dying(real: Callable[..., None]) -> Callable[..., None]:
            def call(*arguments: Any, **keywords: Any) -> None:
                nonlocal left
                if left == 0:
                    raise Killed
                left -= 1
                real(*arguments, **keywords)

            return call

        with monkeypatch.context() as patched:
            for kind, name in ((Objects, "put"), (Objects, "remove"), (MemoryFileSystem, "put_file")):
                patched.setattr(kind, name, dying(getattr(kind, name)))
            try:
                run.save(step, best=True)
                survived = True
            except Killed:
                pass
        run.checkpoint.close()
        again = Run(strategy, str(run.place), keep=1)
        newest.append(again.resumed())
        assert again.resumed("best") == newest[-1]
        complete = (folder for folder in again.folders if f"{folder}/{MANIFEST}" in objects(str(run.place)))
        best = next(folder for folder in complete if folder.startswith(f"step-{newest[-1]:010d}"))
        assert again.save(3).folders == ["step-0000000003", best]
        again.checkpoint.close()
    assert newest == sorted(newest)
    assert len(newest) > 8
    assert (newest[0], newest[-1]) == (1, step)


def test_an_upload_that_was_cut_is_no_checkpoint_and_makes_room(strategy: Strategy, url: str) -> None:
    put(f"{url}/step-0000000001/model.pt", b"the first part of")
    put(f"{url}/step-mine/model.pt", b"somebody's")
    run = Run(strategy, url)
    assert not run.checkpoint.resume()
    run.save(2)
    put(f"{url}/step-0000000003/_run.pt", b"")
    assert run.resumed() == 2
    assert run.save(4).folders == ["step-mine", "step-0000000004", "step-0000000002"]


def test_the_checkpoint_before_a_damaged_one_is_taken(
    strategy: Strategy, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(strategy, url).save(1, 2)
    part = f"{url}/step-0000000002/model.pt"
    put(part, get(part)[::-1])
    assert run.resumed() == 1
    line, resumed = capsys.readouterr().err.splitlines()
    assert resumed == f"unitrain: resumed after step 1, from {url}/step-0000000001"
    assert line == f"unitrain: skipping a damaged checkpoint: {part}: its XXH3-128 does not match the manifest"
    drop(part)
    with pytest.raises(CheckpointError, match=r"the checkpoint is damaged: .*step-0000000002/model\.pt does not exist"):
        run.checkpoint.resume(f"{url}/step-0000000002")


def test_from_a_store_to_a_disk_and_back(strategy: Strategy, url: str, tmp_path: Path) -> None:
    run = Run(strategy, url).save(1)
    for name, said in ((url, "contains checkpoints, such as step-0000000001, but is none"), (f"{url}/9", "does not")):
        with pytest.raises(CheckpointError, match=rf"{name} {said}"):
            run.checkpoint.resume(name)
    run.checkpoint.close()
    local = Run(strategy, str(tmp_path / "run"))
    assert local.resumed(f"{url}/step-0000000001") == 1
    local.save(2)
    local.checkpoint.close()
    assert Run(strategy, f"{url}-2").resumed(str(tmp_path / "run" / "step-0000000002")) == 2


def test_single_files(strategy: Strategy, url: str) -> None:
    model = nn.Linear(2, 1)
    strategy.save({"model": model, "epoch": 3}, f"{url}/last.pt")
    loaded = strategy.load(f"{url}/last.pt")
    assert torch.equal(loaded["model"]["weight"], model.weight)
    assert loaded["epoch"] == 3
    with pytest.raises(CheckpointError, match=rf"{url}/last\.pt could not be written: .*neither a tensor"):
        strategy.save({"code": print}, f"{url}/last.pt")
    assert strategy.load(f"{url}/last.pt")["epoch"] == 3
    put(f"{url}/text.pt", b"hello")
    for name, said in (("none", "does not exist"), ("text", "could not be read: ")):
        with pytest.raises(CheckpointError, match=rf"{url}/{name}\.pt {said}"):
            strategy.load(f"{url}/{name}.pt")
    for folder in (f"{url}/", "s3://bucket"):
        with pytest.raises(UsageError, match=rf"{folder} is the URL of a folder: name a file in it, such as .*/model"):
            strategy.save(1, folder)
    assert objects(url) == ["last.pt", "text.pt"]


def test_a_file_in_several_parts_is_whole(strategy: Strategy, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(pytest.importorskip("s3fs.core"), "calculate_chunksize"):
        pytest.skip("this version of s3fs sends files of less than 100 MB in one part")
    monkeypatch.setattr("s3fs.core.calculate_chunksize", lambda *args, **keywords: 5 * 2**20)  # the smallest of S3
    value = torch.arange(4_000_000)
    strategy.save(value, f"{s3_url}/large.pt")
    assert get(f"{s3_url}/large.pt")[-22:-18] == b"PK\x05\x06"
    assert torch.equal(strategy.load(f"{s3_url}/large.pt"), value)


def test_a_library_that_is_missing_is_named(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(CheckpointError, match=r"gs://bucket/run needs a library: Please install gcsfs to access"):
        strategy.checkpoint("gs://bucket/run", model=nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match=r"gs://bucket needs a library: Please install gcsfs to access"):
        strategy.load("gs://bucket/model.pt")
    with pytest.raises(CheckpointError, match=r"s4://bucket/run can't be used: ValueError: Protocol not known: s4"):
        strategy.checkpoint("s4://bucket/run", model=nn.Linear(1, 1))


def test_credentials_that_are_missing_are_named(
    strategy: Strategy, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(CheckpointError, match="NoCredentialsError: Unable to locate credentials"):
        strategy.checkpoint(s3_url, model=nn.Linear(1, 1))


@pytest.mark.usefixtures("s3_url")
def test_a_bucket_that_is_missing_is_named_and_not_made(strategy: Strategy, server: S3Server) -> None:
    said = r"s3://mybuckte/run/\.lock could not be written: FileNotFoundError: The specified bucket does not exist"
    with pytest.raises(CheckpointError, match=said):
        strategy.checkpoint("s3://mybuckte/run", model=nn.Linear(1, 1))
    assert b"mybuckte" not in server.request("GET", "/")


def test_a_server_that_does_not_answer_is_named_and_not_waited_for_for_ever(
    strategy: Strategy, server: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(strategy, f"{s3_url}-2", background=True)
    monkeypatch.setattr(stores, "PATIENCE_S", 1.0)
    server.pause()
    try:
        with pytest.raises(CheckpointError, match=r"\.lock could not be read: the server has not answered, or was"):
            run.save(1)
        with pytest.raises(CheckpointError, match=r"value\.pt could not be written: the server has not answered, or"):
            strategy.save(1, f"{s3_url}/value.pt")
    finally:
        server.go_on()


def test_a_small_disk_for_temporary_files_is_named(
    strategy: Strategy, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    said = rf"could not be written: No space left in {small_disk}, for"
    with pytest.raises(CheckpointError, match=rf"large\.pt {said}"):
        strategy.save(torch.zeros(10**6), "memory://small/large.pt")
    run = Run(strategy, f"memory://{uuid4().hex}")
    run.notes["large"] = torch.zeros(10**6)
    with pytest.raises(CheckpointError, match=rf"step-0+1 {said}"):
        run.save(1)


def save_slowly(url: str, server: int) -> tuple[int, int, bool]:
    """Return the steps while the server answered nothing, and what is resumed after it went on."""
    with unitrain.init(backend="ddp", device="cpu") as strategy:
        model, optimizer = strategy.prepare(module := nn.Linear(4, 1), torch.optim.SGD(module.parameters(), 0.1))
        checkpoint = strategy.checkpoint(url, model=model, optimizer=optimizer)
        if strategy.is_main:
            os.kill(server, signal.SIGSTOP)
        checkpoint.save()
        saved = module.weight.detach().clone()
        for _ in range(30):
            strategy.step(model(torch.ones(2, 4)).square().mean(), optimizer)
        steps = strategy.global_step
        if strategy.is_main:
            time.sleep(1)
            os.kill(server, signal.SIGCONT)
        checkpoint.wait()
        checkpoint.resume()
        return steps, strategy.global_step, torch.equal(module.weight, saved)


def test_training_goes_on_while_a_server_is_slow(s3_url: str, server: S3Server) -> None:
    assert run_ranks(save_slowly, s3_url, server.pid) == [(30, 0, True)] * 2


ABOUT: dict[str, Any] = {"world_size": 2, "strategy": {}, "config": {}}


@pytest.fixture
def folder() -> Iterator[Folder]:
    folder = Folder(Objects(f"memory://{uuid4().hex}"))
    folder.claim(0)
    yield folder
    folder.release()


def test_a_name_in_an_object_store_is_not_used_again_while_a_slow_rank_may_write_to_it(folder: Folder) -> None:
    failed = folder.begin(5)
    again = folder.begin(5)
    assert (failed.name, again.name) == ("step-0000000005", "step-0000000005.2")
    failed.write({"late": {"part": 1}})
    files = again.write({"other": {"part": 2}})
    folder.write(5, {"own": {}}, ABOUT, again, lambda: files)
    found = folder.find(5)
    assert found.folder == again.name
    assert sorted(found.manifest.files) == ["other.pt", "own.pt"]
    verify(found)
    assert folder.store.list("step-0000000005") == [], "what the slow rank has left is removed"
