"""Files of torch: digests are computed while tensors are written, and pages that were mapped are released."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from unitrain.checkpoint.store.torch_files import MappedFiles, write_part

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


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("read", [MappedFiles.load, MappedFiles.map])
def test_a_file_stays_mapped_as_long_as_its_pages_may_be_released(
    read: Callable[[MappedFiles, Path], Any], tmp_path: Path
) -> None:
    path = tmp_path / "tensor.pt"
    torch.save(torch.arange(100_000), path)
    files = MappedFiles()
    read(files, path)  # and what it returns is dropped
    gc.collect()
    assert is_mapped(path), "else something else could get its addresses, and be overwritten by release()"
    files.release()
    del files
    gc.collect()
    assert not is_mapped(path)
