"""The metadata of a checkpoint of torch.distributed.checkpoint (DCP): which file has which part of which tensor.

DCP stores it as a pickle, which torch itself would load whatever it calls. Here it can only name what metadata consists
of.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from unitrain.checkpoint.store.reading import reason
from unitrain.errors import CheckpointError

_MODULE = "torch.distributed.checkpoint.metadata"
# Plain classes of torch, dtypes, sizes, and paths.
_ALLOWED = {
    (_MODULE, "BytesStorageMetadata"),
    (_MODULE, "ChunkStorageMetadata"),
    (_MODULE, "Metadata"),
    (_MODULE, "MetadataIndex"),
    (_MODULE, "StorageMeta"),
    (_MODULE, "TensorProperties"),
    (_MODULE, "TensorStorageMetadata"),
    (_MODULE, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


def to_bytes(metadata: Metadata) -> bytes:
    """Return the content of a metadata file."""
    return pickle.dumps(metadata)


def from_bytes(content: bytes, shown: str) -> Metadata:
    """Return the metadata in a file, without running code in it.

    Args:
        content: the content of the file.
        shown: path or URL of the file, for messages.

    Raises:
        CheckpointError: it is no metadata, or names files outside of the checkpoint's folder.
    """
    try:
        found = _Unpickler(io.BytesIO(content)).load()
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise ValueError("it is not the metadata of a checkpoint")
        for path in {Path(one.relative_path) for one in found.storage_data.values()}:
            if len(path.parts) != 1 or path.name in ("", ".."):
                raise ValueError(f"it names {path}, which is not in the folder of the checkpoint")
    except Exception as error:  # pickle raises many kinds of exceptions for a broken file
        raise CheckpointError(f"{shown} could not be read: {reason(error)}") from error
    return found


def merged(several: Iterable[Metadata]) -> Metadata:
    """Return the metadata of a checkpoint, given what each rank has written.

    Raises:
        CheckpointError: parts of a tensor are missing, or were written twice.
    """
    whole = Metadata({}, planner_data={}, storage_data={}, storage_meta=StorageMeta(), version="1.0.0")
    for one in several:
        for key, value in one.state_dict_metadata.items():
            known = whole.state_dict_metadata.setdefault(key, value)
            if known is not value:
                if not isinstance(known, TensorStorageMetadata) or not isinstance(value, TensorStorageMetadata):
                    raise CheckpointError(f"two ranks have written {key}")
                known.chunks.extend(value.chunks)
        whole.planner_data.update(one.planner_data)
        whole.storage_data.update(one.storage_data)
    for key, value in whole.state_dict_metadata.items():
        if isinstance(value, TensorStorageMetadata):
            found, expected = sum(prod(chunk.sizes) for chunk in value.chunks), prod(value.size)
            if found != expected:
                raise CheckpointError(f"the ranks have written {found} elements of {key}, which has {expected}")
    return whole
