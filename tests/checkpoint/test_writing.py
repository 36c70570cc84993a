"""The digest of a checkpoint's file is that of the file, though it is computed while tensors are written."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from unitrain.checkpoint.store.torch_files import write_part

LARGE = torch.arange(2**20, dtype=torch.float32)


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")
@pytest.mark.parametrize(
    "value",
    [
        {"large": LARGE, "small": torch.ones(3), "again": LARGE + 1},
        {"view": LARGE[1000:], "transposed": LARGE.view(1024, 1024).t(), "same": LARGE},
        {"text": "of the pickle" * 100_000, "large": LARGE},
        {"sparse": torch.eye(300).to_sparse(), "large": LARGE.clone()},
        {},
    ],
    ids=["sizes", "views", "text", "sparse", "nothing"],
)
def test_the_digest_is_that_of_the_file(tmp_path: Path, value: dict[str, Any]) -> None:
    path = tmp_path / "part.pt"
    described = write_part(path, value, lambda: None)
    content = path.read_bytes()
    assert described == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert torch.load(path).keys() == value.keys()


def test_all_tensors_are_written_before_the_first_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, sha256 = threading.Event(), hashlib.sha256

    class Slow:
        def __init__(self) -> None:
            self.digest = sha256()
            self.hexdigest = self.digest.hexdigest

        def update(self, data: bytes) -> None:
            assert written.wait(30), "writing waits for the digest"
            self.digest.update(data)

    monkeypatch.setattr(hashlib, "sha256", Slow)
    described = write_part(tmp_path / "part.pt", {"first": LARGE, "second": LARGE + 1}, written.set)
    assert described["sha256"] == sha256((tmp_path / "part.pt").read_bytes()).hexdigest()
