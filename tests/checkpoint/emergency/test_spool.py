"""The spool: an emergency checkpoint in this host's memory, and the next start that moves it to its folder."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from unitrain.checkpoint.emergency import spool as spools
from unitrain.checkpoint.emergency.spool import Spool, is_too_slow
from unitrain.checkpoint.store import storage
from unitrain.checkpoint.store.local import LocalFolder
from unitrain.checkpoint.store.manifest import DamagedError
from unitrain.errors import CheckpointError

ABOUT: dict[str, Any] = {"best": None, "unitrain": "1", "torch": "2", "world_size": 2, "strategy": {}, "config": {}}


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of this host's memory."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(spools, "MEMORY", tmp_path / "memory")
    return tmp_path / "memory"


@pytest.fixture
def spool(memory: Path) -> Spool:
    """The spool of a run, with a checkpoint of step 7."""
    made = Spool(uuid4().hex)
    made.make(1000)
    storage.write(made.folder, 7, {"model": {"weight": 1.0}}, ABOUT)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    (tmp_path / "checkpoints").mkdir()
    return LocalFolder(tmp_path / "checkpoints")


def test_a_checkpoint_is_moved(spool: Spool, folder: LocalFolder) -> None:
    assert spool.newest() == 7
    spool.move(7, folder)
    assert folder.steps() == [7]
    assert storage.verify(Path(folder.name(7))).step == 7
    assert spool.newest() is None


def test_it_is_never_moved_over_another(spool: Spool, folder: LocalFolder) -> None:
    before = storage.write(Path(str(folder)), 7, {"model": {"weight": 2.0}}, ABOUT)
    content = (before / "model.pt").read_bytes()
    spool.move(7, folder)
    assert (before / "model.pt").read_bytes() == content
    assert os.listdir(str(folder)) == ["step-0000000007"]


def test_a_damaged_one_is_not_moved(spool: Spool, folder: LocalFolder) -> None:
    file = storage.folder_of(spool.folder, 7) / "model.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedError, match="SHA-256 does not match"):
        spool.move(7, folder)
    assert folder.steps() == []


def test_one_whose_best_is_missing_is_not_moved(spool: Spool, folder: LocalFolder) -> None:
    storage.write(spool.folder, 8, {"model": {"weight": 1.0}}, {**ABOUT, "best": 5})
    with pytest.raises(DamagedError, match="the best checkpoint, of step 5, was not completed"):
        spool.move(8, folder)


def test_only_this_user_can_use_it(spool: Spool, memory: Path) -> None:
    assert all(path.stat().st_mode & 0o077 == 0 for path in (spool.folder, spool.folder.parent))
    spool.folder.parent.chmod(0o777)
    assert spool.newest() is None
    with pytest.raises(CheckpointError, match="is not a folder that only this user can use"):
        spool.make(1)


def test_a_link_in_its_place_is_not_followed(memory: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (memory / f"unitrain-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is not a folder that only this user can use"):
        Spool(uuid4().hex).make(1)


def test_without_room_nothing_is_written(memory: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has room for [0-9]+ bytes, and 1000000000000000 are needed"):
        Spool(uuid4().hex).make(10**15)
    assert list(memory.iterdir()) == []


def test_a_name_that_leads_elsewhere_is_refused() -> None:
    with pytest.raises(CheckpointError, match="remove the file run-id"):
        Spool("../../etc")


def test_old_ones_are_removed_with_a_word(spool: Spool, capfd: pytest.CaptureFixture[str]) -> None:
    other = Spool(uuid4().hex)
    other.remove_stale()
    assert spool.newest() == 7
    ago = time.time() - 8 * 24 * 3600
    os.utime(spool.folder, (ago, ago))
    spool.remove_stale()
    assert spool.newest() == 7, "it is this run's own"
    other.remove_stale()
    assert not spool.folder.exists()
    assert f"removed {spool.folder}, an emergency checkpoint of a run of 8 days ago" in capfd.readouterr().err


def test_what_is_spooled() -> None:
    """1 GB under mpirun, which leaves a second, and not under torchrun, which leaves 30."""
    assert is_too_slow(10**9, 0.9)
    assert not is_too_slow(10**9, 27)
    assert not is_too_slow(10**7, 0.9)
