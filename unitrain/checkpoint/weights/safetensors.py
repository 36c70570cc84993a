"""Reads the format of safetensors: a header in JSON, and the bytes of tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unitrain.errors import CheckpointError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
INDEX = ".safetensors.index.json"
_LARGEST_HEADER = 10**8  # bytes, as in the library safetensors


class Stored(NamedTuple):
    """A tensor in a file."""

    dtype: torch.dtype
    shape: list[int]
    start: int
    """The first of its bytes in the file."""
    end: int

    def rows(self, start: int, end: int) -> Stored:
        """Return some of its rows."""
        row = (self.end - self.start) // max(1, self.shape[0])
        return Stored(self.dtype, [end - start, *self.shape[1:]], self.start + start * row, self.start + end * row)


def name_in(names: Sequence[str], folder: str) -> str:
    """Return which of the files in a folder has weights, or an index of them. Raises CheckpointError if none has."""
    for end in (".safetensors", INDEX):
        if f"model{end}" in names:
            return f"model{end}"
    raise CheckpointError(f"{folder} has neither model.safetensors nor model{INDEX}: name the file.")


def names_in_index(text: bytes, shown: str) -> list[str]:
    """Return the names of the files in the text of an index. Raises CheckpointError if it is not one."""
    try:
        names = sorted(set(json.loads(text)["weight_map"].values()))
        if any("/" in name for name in names):
            raise ValueError("it names a file in another folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{shown} is no index of safetensors: {type(error).__name__}: {error}") from error
    return names


def stored_in(read: Callable[[int, int], bytes], size: int, shown: str) -> dict[str, Stored]:
    """Return where the tensors of a file are, given what returns its bytes between two positions, and their number.

    Raises CheckpointError if it is no such file.
    """
    try:
        length = int.from_bytes(read(0, 8), "little")
        if length > _LARGEST_HEADER:
            raise ValueError(f"its header would have {length} bytes")
        header = json.loads(read(8, 8 + length))
        header.pop("__metadata__", None)
        return {name: _stored(8 + length, size, about) for name, about in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{shown} is no whole file of safetensors: {type(error).__name__}: {error}") from error


def tensor_of(raw: Tensor, stored: Stored) -> Tensor:
    """Return a tensor, given its bytes."""
    if raw.data_ptr() % stored.dtype.itemsize or raw.storage_offset() % stored.dtype.itemsize:
        raw = raw.clone()  # it can't be viewed
    return raw.view(stored.dtype).view(stored.shape)


def _stored(begin: int, size: int, about: Any) -> Stored:
    dtype, shape = DTYPES[about["dtype"]], [int(length) for length in about["shape"]]
    start, end = (begin + int(offset) for offset in about["data_offsets"])
    if not (begin <= start <= end <= size and end - start == math.prod(shape) * dtype.itemsize):
        raise ValueError(f"{about} does not fit into {size} bytes")
    return Stored(dtype, shape, start, end)
