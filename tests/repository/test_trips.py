"""How many files handle a sharded tensor on its way to the disk and back."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from places import ROOT
from ranks import run_ranks
from torch import Tensor, nn

import unitrain

MOST_FILES = 18
COLUMNS = 5  # of the weight that is followed, and of its moments
STARTS = ("unitrain/testing/", "unitrain/job/starting/")  # of the test's own ranks


def is_followed(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == COLUMNS and not value.is_meta


def has_followed(value: Any, depth: int = 7) -> bool:
    """Return whether the tensor is a value, or within nested dicts, lists and tuples."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return is_followed(value) or (depth > 0 and any(has_followed(item, depth - 1) for item in list(items)))


def is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((f"{ROOT}/unitrain/", f"{ROOT}/backends/"))


def our_files(frame: FrameType | None) -> Iterator[str]:
    """Yield the files of the package whose functions a call is within."""
    while frame is not None:
        if is_ours(frame):
            yield frame.f_code.co_filename.removeprefix(f"{ROOT}/")
        frame = frame.f_back


@contextmanager
def recorded(files: set[str]) -> Iterator[None]:
    """Record the files of functions that take or return the tensor, in all threads, and of those that call them."""

    def look(frame: FrameType, event: str, value: Any) -> None:
        if event not in ("call", "return") or not is_ours(frame):
            return
        if any(map(has_followed, list(frame.f_locals.values()) if event == "call" else [value])):
            files.update(our_files(frame))

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def save_and_resume(folder: Path) -> set[str]:
    with unitrain.init(backend="fsdp", device="cpu", memory_copies={"every": 0}) as strategy:
        model = nn.Sequential(nn.Linear(COLUMNS, 6), nn.Linear(6, 6))
        model, optimizer = strategy.prepare(model, torch.optim.Adam(model.parameters()))
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer)
        strategy.step(model(torch.ones(2, COLUMNS)).sum(), optimizer)
        files: set[str] = set()
        with recorded(files):
            checkpoint.save()
            checkpoint.wait()
            checkpoint.resume()
        return files


def test_few_files_handle_a_shard(tmp_path: Path) -> None:
    files = set().union(*run_ranks(save_and_resume, tmp_path, fresh=True))
    found = sorted(file for file in files if not file.startswith(STARTS))
    assert "unitrain/checkpoint/sharded/dcp.py" in found, "it was followed to the disk"
    assert "backends/fsdp/shards.py" in found
    assert len(found) <= MOST_FILES, found
