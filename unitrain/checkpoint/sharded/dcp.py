"""Checkpoints of torch.distributed.checkpoint (DCP): written from states of ours, and read without running code.

DCP's files have parts of tensors, each saved by ``torch.save``, and a file ``.metadata`` says which part is where. That
one is a pickle, which torch itself would load whatever it calls.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType

from unitrain.checkpoint.store.reading import open_regular, reason
from unitrain.communication.streaming import RowBlocks
from unitrain.errors import CheckpointError

METADATA = ".metadata"
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
# What a metadata file names: plain classes of torch, dtypes, sizes, and paths.
_ALLOWED = {
    (_METADATA_MODULE, "BytesStorageMetadata"),
    (_METADATA_MODULE, "ChunkStorageMetadata"),
    (_METADATA_MODULE, "Metadata"),
    (_METADATA_MODULE, "MetadataIndex"),
    (_METADATA_MODULE, "StorageMeta"),
    (_METADATA_MODULE, "TensorProperties"),
    (_METADATA_MODULE, "TensorStorageMetadata"),
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


# ---------------------------------------------------------------------------------------------------------- writing


def write(state: Mapping[str, Any], folder: Path) -> None:
    """Write nested state to a new folder, in DCP's layout. At most one block of a tensor is in memory at a time.

    Args:
        state: tensors, ``RowBlocks`` and plain data, in dicts and lists.
        folder: the folder.

    Raises:
        CheckpointError: it could not be written.
    """
    with _in_one_process(f"{folder} could not be written"):
        dcp.save(dict(state), storage_writer=FileSystemWriter(folder), planner=_BlockPlanner(), no_dist=True)


class _BlockPlanner(DefaultSavePlanner):
    """Writes each block of a tensor as the shard of a rank."""

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for key, value in self.state_dict.items():
            blocks = _blocks(key, value) if isinstance(value, RowBlocks) else None
            items += blocks or create_default_local_save_plan({key: value}, True).items
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if not isinstance(value, RowBlocks):
            return value
        assert index.offset is not None
        return dict(_by_offset(value))[index.offset[0]]


def _by_offset(value: RowBlocks) -> Iterator[tuple[int, Tensor]]:
    """Yield the first row of each block that has rows, and the block; one without, if there are no rows at all."""
    first = 0
    for block in value.blocks:
        if len(block) or not value.form.shape[0]:
            yield first, block
        first += len(block)


def _blocks(key: str, value: RowBlocks) -> list[WriteItem]:
    size = torch.Size(value.form.shape)
    properties = TensorProperties(dtype=value.form.dtype)
    return [
        WriteItem(
            MetadataIndex(key, (offset := torch.Size([first, *[0] * (len(size) - 1)]))),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(ChunkStorageMetadata(offset, block.shape), properties, size),
        )
        for first, block in dict(_by_offset(value)).items()
    ]


# ---------------------------------------------------------------------------------------------------------- reading


class Reader:
    """Reads a checkpoint in DCP's layout. Code in its files is refused, and never run.

    Args:
        folder: its folder.

    Attributes:
        keys: the keys, in the order of the metadata; for a tensor its shape and dtype, for other values None.

    Raises:
        CheckpointError: there is none, or its metadata can't be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not (folder / METADATA).exists():
            raise CheckpointError(
                f"{folder} has no {METADATA}, so it is no complete checkpoint of torch.distributed.checkpoint: name "
                "the folder that dcp.save was given."
            )
        with _in_one_process(f"{folder / METADATA} could not be read"), open_regular(folder / METADATA) as file:
            self._metadata = _checked(_Unpickler(file).load())
            found = self._metadata.state_dict_metadata
        self.keys: dict[str, tuple[torch.Size, torch.dtype] | None] = {
            key: (one.size, one.properties.dtype) if isinstance(one, TensorStorageMetadata) else None
            for key, one in found.items()
        }

    def read(self, state: dict[str, Any]) -> None:
        """Fill the tensors of a dict, and replace its other values, by key.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        with _in_one_process(f"{self._folder} could not be read"):
            planner = _PlainPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            dcp.load(state, storage_reader=_Storage(self._folder, self._metadata), planner=planner, no_dist=True)


class _Storage(FileSystemReader):
    """Reads the files that metadata names."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _PlainPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


def _checked(metadata: Any) -> Metadata:
    """Return metadata whose files are all in the folder of the checkpoint."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError("it is not the metadata of a checkpoint")
    for one in metadata.storage_data.values():
        path = Path(one.relative_path)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"it names {path}, which is not in the folder of the checkpoint")
    return metadata


@contextmanager
def _in_one_process(failure: str) -> Iterator[None]:
    """Context manager in which DCP is used without other ranks. Its errors become a CheckpointError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{failure}: {reason(first) if isinstance(first, Exception) else first}") from error
    except Exception as error:  # torch.load and pickle raise many kinds of exceptions for a broken file
        raise CheckpointError(f"{failure}: {reason(error)}") from error
