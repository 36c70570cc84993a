"""Reads the format of safetensors, mapped into memory: a header in JSON, and the bytes of tensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from unitrain.checkpoint.mapped import MappedFiles
from unitrain.checkpoint.reading import open_regular
from unitrain.errors import CheckpointError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
INDEX = ".safetensors.index.json"
_LARGEST_HEADER = 10**8  # bytes, as in the library safetensors


def files_at(path: Path) -> list[Path]:
    """Return the files with a model's weights: one, or those that an index of Hugging Face names.

    Args:
        path: a file, an index, or the folder of one of either.

    Raises:
        CheckpointError: there is none, or the index is none.
    """
    if path.is_dir():
        found = [path / f"model{end}" for end in (".safetensors", INDEX) if (path / f"model{end}").exists()]
        if not found:
            raise CheckpointError(f"{path} has neither model.safetensors nor model{INDEX}: name the file.")
        path = found[0]
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    if not path.name.endswith(INDEX):
        return [path]
    try:
        names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        if any("/" in name for name in names):
            raise ValueError("it names a file in another folder")
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{path} is no index of safetensors: {type(error).__name__}: {error}") from error
    return [path.parent / name for name in names]


def tensors_in(path: Path, files: MappedFiles) -> dict[str, Tensor]:
    """Return the tensors of a file, which are read from the disk when they are used.

    Raises:
        CheckpointError: it can't be read, or is no such file.
    """
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LARGEST_HEADER:
                raise ValueError(f"its header would have {length} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        content = files.map(path)
        return {name: _tensor(content, 8 + length, about) for name, about in header.items()}
    except OSError as error:
        raise CheckpointError(f"{path} could not be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no whole file of safetensors: {type(error).__name__}: {error}") from error


def _tensor(content: UntypedStorage, begin: int, about: Any) -> Tensor:
    dtype, shape = DTYPES[about["dtype"]], [int(size) for size in about["shape"]]
    start, end = (begin + int(offset) for offset in about["data_offsets"])
    if not (begin <= start <= end <= content.nbytes() and end - start == math.prod(shape) * dtype.itemsize):
        raise ValueError(f"{about} does not fit into {content.nbytes()} bytes")
    raw = torch.empty(0, dtype=torch.uint8).set_(content, start, [end - start], [1])
    if start % dtype.itemsize:
        raw = raw.clone()  # it can't be viewed
    return raw.view(dtype).view(shape)
