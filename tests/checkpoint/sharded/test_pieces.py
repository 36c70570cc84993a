"""Pieces of tensors are read as torch reads them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from unitrain.checkpoint.sharded import dcp as pieces
from unitrain.checkpoint.sharded.dcp import METADATA, Region, Stored
from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.located import Located, Manifest

MADE: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(5, 3),
    "transposed": lambda: torch.randn(3, 5).t(),
    "view": lambda: torch.randn(9, 3)[4:],
    "conjugate": lambda: torch.randn(5, 3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(5, 3, dtype=torch.complex64).conj().imag,
    "flags": lambda: torch.rand(7) > 0.5,
    "number": lambda: torch.randn((), dtype=torch.float64),
    "empty": lambda: torch.randn(0, 3),
    "bfloat16": lambda: torch.randn(11).bfloat16(),
}


def stored_at(folder: Path, metadata: bytes) -> Stored:
    return Stored(Located(Disk(folder), "", Manifest(step=0, strategy={}, config={}, files={})), metadata)


@pytest.mark.parametrize("name", MADE)
def test_tensors_that_torch_has_written_are_read_with_their_elements(name: str, tmp_path: Path) -> None:
    state = {f"{name}.{number}": MADE[name]() for number in range(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    stored = stored_at(tmp_path, (tmp_path / METADATA).read_bytes())
    targets = {key: stored.layout[key].new() for key in state}
    stored.read({key: (target, Region.rows(0, target)) for key, target in targets.items()})
    for key, target in targets.items():
        assert torch.equal(target, state[key])


def test_a_large_tensor_is_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 40)
    with open(tmp_path / "file", "wb") as file:
        found = list(pieces.write(file, "file", torch.randn(8, 3), 10))
    assert [piece.region for piece in found] == [
        Region((first, 0), (rows, 3)) for first, rows in ((10, 3), (13, 3), (16, 2))
    ]
    assert all(piece.start % 64 == 0 for piece in found)
