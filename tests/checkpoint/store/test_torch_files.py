"""Files of torch: digests are computed while they are written, and pages that were mapped are released."""

from __future__ import annotations

import gc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from xxhash import xxh3_128_hexdigest

from unitrain.checkpoint.store.torch_files import MappedFiles, save_without_crc, write_part


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")
def test_the_digest_is_that_of_the_file_which_torch_loads(tmp_path: Path) -> None:
    path, large = tmp_path / "part.pt", torch.arange(2**20, dtype=torch.float32)  # of several blocks
    value: dict[str, Any] = {"views": [large[1000:], large.view(1024, 1024).t()], "text": "of the pickle" * 100_000}
    described = write_part(path, lambda file: save_without_crc({**value, "sparse": torch.eye(300).to_sparse()}, file))
    content = path.read_bytes()
    assert described == {"size": len(content), "xxh3": xxh3_128_hexdigest(content)}
    assert torch.equal(torch.load(path)["views"][1], value["views"][1])
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip(), "it has no CRC-32"
    torch.save(value, path)  # of the script
    with zipfile.ZipFile(path) as archive:
        assert not archive.testzip()


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
