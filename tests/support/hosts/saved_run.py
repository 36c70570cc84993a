"""For tests of what is kept where: a run that saves without training, and what is found in a folder; a plugin."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import Self
from xxhash import xxh3_128_hexdigest

import unitrain
from unitrain import Strategy
from unitrain.checkpoint import Checkpoint
from unitrain.checkpoint.store import located
from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.folder import Folder
from unitrain.checkpoint.store.located import Manifest
from unitrain.checkpoint.store.store import NAME, folder_name


@pytest.fixture
def strategy() -> Iterator[Strategy]:
    """Return a strategy of one process."""
    with unitrain.init(backend="single", device="cpu") as strategy:
        yield strategy


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return the folder of a file system of 3 MB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=False, capture_output=True)  # a test may have done so


def steps_in(folder: str | Path) -> list[int]:
    """Return the steps that have a checkpoint, newest first."""
    return Folder(Disk(Path(folder))).steps()


def folder_of(folder: str | Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return Path(folder) / folder_name(step)


def verified(folder: Path) -> Manifest:
    """Verify every byte of a checkpoint, and return its manifest."""
    found = located.locate(Disk(folder), "")
    verify(found)
    return found.manifest


def verify(found: located.Located) -> None:
    """Verify every file of a checkpoint."""
    for name in found.manifest.files:
        with located.verified(found, name):
            pass


def described(folder: Path, *, step: int | None = None, without: str = "") -> None:
    """Write the manifest of a checkpoint anew, for its files as they are now."""
    about = json.loads((folder / NAME).read_text())
    del about["digest"], about["schema"]
    files, before = about.pop("files"), about.pop("step")
    now = {}
    for name in files.keys() - {without}:
        content = (folder / name).read_bytes()
        now[name] = {"size": len(content), "xxh3": xxh3_128_hexdigest(content)}
    (folder / NAME).write_text(located.to_json(before if step is None else step, about, now))


class SavedRun:
    """A run whose model's weight is the step, saved without training to a folder or a URL."""

    def __init__(self, strategy: Strategy, place: str | Path, *, keep: int = 2, background: bool = False) -> None:
        self.strategy = strategy
        self.place = place
        self.model = nn.Linear(1, 1)
        self.notes: dict[str, Any] = {}
        self.checkpoint: Checkpoint = strategy.checkpoint(
            place, model=self.model, notes=self.notes, keep=keep, background=background
        )

    def save(self, *steps: int, best: bool = False) -> Self:
        for step in steps:
            self.strategy._step.global_step = step
            with torch.no_grad():
                self.model.weight.fill_(step)
            self.checkpoint.save(best=best)
        self.checkpoint.wait()
        return self

    def resumed(self, path: str | Path | None = None) -> int:
        """Resume, and return the step."""
        assert self.checkpoint.resume(path)
        assert self.model.weight.item() == self.strategy.global_step
        return self.strategy.global_step
