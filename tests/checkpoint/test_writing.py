"""The digest of a checkpoint's file is that of the file, though it is computed while tensors are written."""

from __future__ import annotations

import hashlib
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
