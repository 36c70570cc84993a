"""Files of torch: digests are computed while tensors are written, and pages that were mapped are released."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from unitrain.checkpoint.store.torch_files import MappedFiles


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
