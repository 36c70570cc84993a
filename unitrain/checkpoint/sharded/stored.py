"""``Stored``: the tensors of a checkpoint in several files, of which a rank reads the parts that it needs, in place."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader

from unitrain.checkpoint.sharded.parts import Region
from unitrain.checkpoint.store.located import Located, verified
from unitrain.checkpoint.store.manifest import DamagedError
from unitrain.checkpoint.store.reading import reason
from unitrain.errors import CheckpointError


class Files(FileSystem):
    """Files of a checkpoint that this rank has verified, for torch's reader.

    Args:
        found: the checkpoint.
    """

    def __init__(self, found: Located) -> None:
        self._found = found
        self._open = ExitStack()
        self._paths: dict[str, Path] = {}

    def fetch(self, names: Iterable[str]) -> None:
        """Verify files, which are downloaded from an object store, unless that has been done.

        Raises:
            DamagedError: one is missing or changed.
            CheckpointError: one can't be downloaded.
        """
        for name in sorted(set(names) - self._paths.keys()):
            store, file = self._found.store, self._found.file_name(name)
            if not self._found.manifest.files:  # another tool has written them, without a manifest
                self._paths[name] = self._open.enter_context(store.file(file))
            elif name not in self._found.manifest.files:
                raise DamagedError(f"{store.shown(file)} is not in the manifest")
            else:
                self._paths[name] = self._open.enter_context(verified(self._found, name))

    def concat_path(self, path: Any, suffix: str) -> Path:
        """Return the path of a file, which is fetched if need be."""
        self.fetch([suffix])
        return self._paths[suffix]

    def close(self) -> None:
        """Remove what was downloaded."""
        self._open.close()
        self._paths.clear()


class Stored:
    """Tensors and plain values by key.

    Args:
        metadata: which file has which part of a tensor.
        reader: reads the parts.
        files: the files; None if ``reader`` needs none.

    Attributes:
        metadata: as given.
        files: as given.
    """

    def __init__(self, metadata: Metadata, reader: StorageReader, files: Files | None = None) -> None:
        self.metadata: Metadata = metadata
        self.files: Files | None = files
        self._reader = reader

    @classmethod
    def at(cls, found: Located, metadata: Metadata) -> Stored:
        """Return what a checkpoint of torch.distributed.checkpoint has, given its metadata."""
        reader = FileSystemReader(".")
        reader.fs = files = Files(found)
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        return cls(metadata, reader, files)

    def tensor(self, key: str) -> TensorStorageMetadata | None:
        """Return the metadata of a tensor; None for a plain value."""
        one = self.metadata.state_dict_metadata[key]
        return one if isinstance(one, TensorStorageMetadata) else None

    @torch.no_grad()
    def read(self, tensors: Mapping[str, tuple[Tensor, Region]]) -> None:
        """Overwrite tensors with regions, by key.

        Raises:
            DamagedError: a file is missing or damaged.
            CheckpointError: a part of a tensor is in no file, or code is in a file.
        """
        regions = {key: region for key, (_, region) in tensors.items()}
        targets = {key: target for key, (target, _) in tensors.items()}
        planner = _Planner(self.metadata, regions, targets)
        self._read(planner.create_local_plan(), planner)

    def values(self, keys: Collection[str]) -> dict[str, Any]:
        """Return plain values by key. Raises the errors of ``read``."""
        planner, nothing = _Planner(self.metadata, {}, {}), torch.Size([0])
        indices = map(MetadataIndex, keys)
        items = [ReadItem(LoadItemType.BYTE_IO, one, nothing, one, nothing, nothing) for one in indices]
        self._read(LoadPlan(items), planner)
        return planner.values

    def _read(self, plan: LoadPlan, planner: _Planner) -> None:
        try:
            self._reader.read_data(plan, planner).wait()
        except (DamagedError, CheckpointError):
            raise
        except Exception as error:  # torch.load raises many kinds of exceptions for a broken file
            kind = CheckpointError if "GLOBAL" in str(error) else DamagedError  # code is no damage, but an attack
            raise kind(f"a file of the checkpoint could not be read: {reason(error)}") from error


class _Planner(DefaultLoadPlanner):
    """Reads regions of tensors.

    Args:
        metadata: which file has which part of a tensor.
        regions: the regions, by key.
        targets: the tensors that get the regions, by key.

    Attributes:
        values: plain values that were read, by key.
    """

    def __init__(self, metadata: Metadata, regions: Mapping[str, Region], targets: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.metadata = metadata
        self._regions = regions
        self._targets = targets
        self.values: dict[str, Any] = {}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for key, (offsets, sizes) in self._regions.items():
            saved = self.metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata)
            found = create_read_items_for_chunk_list(key, saved, [ChunkStorageMetadata(offsets, sizes)])
            if sum(prod(item.lengths) for item in found) != prod(sizes):
                raise CheckpointError(f"a part of {key} is in no file of the checkpoint")
            items += found
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._targets[index.fqn]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.values[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)
