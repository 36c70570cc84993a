"""Files of checkpoints are on their way to the disk while they are written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from unitrain import CheckpointError
from unitrain.checkpoint import storage, writing

MIB = 2**20
PARTS = {"model": {str(i): torch.full((4 * MIB,), i, dtype=torch.uint8) for i in range(12)}}
ABOUT = {"world_size": 1, "strategy": {}, "config": {}}


def test_a_large_file_is_written_back_before_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    fdatasync = os.fdatasync

    def observed(descriptor: int) -> None:
        written.append(os.fstat(descriptor).st_size)
        fdatasync(descriptor)

    monkeypatch.setattr(os, "fdatasync", observed)
    folder = storage.write(tmp_path, 1, PARTS, ABOUT)
    storage.verify(folder)
    assert writing._WRITTEN_BACK <= written[0] < (folder / "model.pt").stat().st_size


def test_an_error_of_the_disk_meanwhile_is_an_error_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(CheckpointError, match=r"could not be written: .*Input/output error"):
        storage.write(tmp_path, 1, PARTS, ABOUT)
    assert not list(tmp_path.iterdir())
