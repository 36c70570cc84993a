"""Sharded state is written by all ranks, in the format of torch.distributed.checkpoint (DCP): each writes its own file.

No process group is needed. What a rank writes follows from its own state, so there is no plan to agree on. Ranks write
in the background, where there are no collectives: each leaves the metadata of its file for rank 0, which joins them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from unitrain.checkpoint.names import METADATA, STATE, Keys, flat_options, joined, keys_of, optimizer_values
from unitrain.checkpoint.run_state import RunState
from unitrain.checkpoint.sharded import metadata as metadatas
from unitrain.checkpoint.sharded.parts import owners
from unitrain.checkpoint.store.folder import Draft, Folder
from unitrain.checkpoint.store.reading import reason
from unitrain.checkpoint.store.writing import Digest, Writing
from unitrain.communication.communicator import Communicator
from unitrain.communication.streaming import own_rows
from unitrain.errors import CheckpointError
from unitrain.process import print_stderr

PIECE_BYTES = 2**25
"""Larger tensors are written in pieces, as torch reads a piece into memory as a whole."""
_POLL_S, _LONGEST_POLL_S = 0.005, 1.0


class Rows(NamedTuple):
    """Which rows of a tensor a rank writes."""

    first: int
    whole: torch.Size
    """The shape of the whole tensor."""


class Shards(NamedTuple):
    """What a rank writes of the states of modules and optimizers, by key."""

    values: dict[str, Any]
    """Rows of a tensor, or plain data."""
    rows: dict[str, Rows]
    paths: dict[str, Keys]
    """Where in the states the values are."""
    aliases: dict[str, tuple[Keys, str]]
    """Further keys of values, with a path and the key in ``values``."""


# ----------------------------------------------------------------------------------------------- what a rank writes


def divided(communicator: Communicator, state: RunState, parts: Mapping[str, Any]) -> tuple[dict[str, Any], Shards]:
    """Return the states of objects that rank 0 writes alone, and what this rank writes of the others. Collective.

    Args:
        communicator: the communicator of this process.
        state: the state of the run.
        parts: the states of the run's objects, by name.
    """
    shards = Shards({}, {}, {}, {})
    plain: dict[Keys, Any] = {}
    for name in state.modules:
        _add(communicator, shards, plain, (((name, key), value) for key, value in parts[name].items()), {})
    for name, names in state.names.items():
        its = parts[name]
        keys = keys_of(names, sum(len(group["params"]) for group in its["param_groups"]))
        ranks = dict(zip(keys, owners(communicator, its[STATE], len(keys)), strict=True))
        _add(communicator, shards, plain, optimizer_values(name, its, keys), ranks)
        if communicator.is_main:
            shards.aliases.update((joined(path), (path, joined(to))) for path, to in flat_options(name, its, keys))
    if not communicator.shards_parameters:
        # All plain values are in rank 0's file, since rank 0 reads them when a run is resumed.
        for own in communicator.all_gather_object(plain):
            plain.update(own)
    for path, value in plain.items() if communicator.is_main else ():
        shards.values[joined(path)], shards.paths[joined(path)] = value, path
    return {name: its for name, its in parts.items() if name not in (*state.modules, *state.names)}, shards


def _add(
    communicator: Communicator,
    shards: Shards,
    plain: dict[Keys, Any],
    values: Iterable[tuple[Keys, Any]],
    ranks: Mapping[str, int | None],
) -> None:
    """Add what this rank writes of values, and plain data to ``plain``, given which rank has a parameter's state."""
    for path, value in values:
        owner = (ranks.get(path[2]) or 0) if path[1] == STATE else 0
        sharded = communicator.is_sharded(value)
        if not sharded and owner != communicator.rank:
            continue
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
            plain[path] = value
            continue
        local, first = own_rows(communicator, value) if sharded else (value, 0)
        if local.numel() or (communicator.is_main and not value.numel()):
            key = joined(path)
            shards.values[key], shards.rows[key], shards.paths[key] = local.detach(), Rows(first, value.shape), path


# ------------------------------------------------------------------------------------------------------ one file


class _Planner(DefaultSavePlanner):
    """Writes a rank's values, with large tensors in pieces."""

    def __init__(self, shards: Shards) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards = shards

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([item for key in self._shards.values for item in self._items(key)])
        return self.plan

    def _items(self, key: str) -> Iterator[WriteItem]:
        rows, value = self._shards.rows.get(key), self._shards.values[key]
        if rows is None:
            yield WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
            return
        count = len(value) if value.dim() else 1
        step = max(1, PIECE_BYTES * count // max(1, value.nbytes))
        for start in range(0, max(1, count), step):
            sizes = torch.Size([min(step, count - start), *value.shape[1:]][: value.dim()])
            offset = torch.Size([rows.first + start, *[0] * value.dim()][: value.dim()])
            data = TensorWriteData(ChunkStorageMetadata(offset, sizes), TensorProperties(value.dtype), rows.whole)
            yield WriteItem(MetadataIndex(key, offset), WriteItemType.SHARD, tensor_data=data)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._shards.values[index.fqn]

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002
        if write_item.tensor_data is None:
            return super().transform_object(write_item, object)
        chunk = write_item.tensor_data.chunk
        first = self._shards.rows[write_item.index.fqn].first
        return object.narrow(0, chunk.offsets[0] - first, chunk.sizes[0]) if object.dim() else object


class _OneFile(FileSystem):
    """Has torch write to one file, which is hashed meanwhile."""

    def __init__(self, path: Path, digest: Digest) -> None:
        self._path = path
        self._digest = digest
        self.writing: Writing | None = None

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        with open(self._path, "wb") as file:
            self.writing = Writing(file, self._digest)
            yield self.writing

    def mkdir(self, path: Any) -> None:
        """Do nothing: the folder is there."""

    def exists(self, path: Any) -> bool:
        return False


def write_shards(draft: Draft, rank: int, shards: Shards) -> tuple[dict[str, Any], Metadata]:
    """Write a rank's file, and return what the manifest says of it, and its metadata.

    Args:
        draft: the checkpoint.
        rank: the number of the file.
        shards: what the rank writes, in host memory.
    """
    if not shards.values:
        return {}, Metadata({}, planner_data={}, storage_data={})
    name = f"__{rank}_0.distcp"  # as torch names it
    planner = _Planner(shards)
    with draft.store.draft(f"{draft.name}/{name}") as path, ThreadPoolExecutor(1, "checkpoint digest") as thread:
        # Without a copy ahead, torch does not ask for a stream of the GPU, which would be the first one in a thread.
        writer = FileSystemWriter(path.parent, sync_files=False, per_thread_copy_ahead=0)
        digest = Digest(shards.values, thread)
        writer.fs = file = _OneFile(path, digest)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        try:
            results = writer.write_data(plan, planner).wait()
        except RuntimeError as error:
            raise (file.writing and file.writing.error) or error from error
        assert file.writing is not None
        described = {"size": file.writing.size, "sha256": digest.hexdigest()}
        draft.store.put(f"{draft.name}/{name}", path)
    _, metadata = create_default_global_save_plan([plan])
    metadata.storage_data = {one.index: one.storage_data for one in results}
    metadata.planner_data = dict(shards.paths)
    for alias, (path_, key) in shards.aliases.items():
        if alias not in shards.paths:
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[key]
            metadata.storage_data[MetadataIndex(alias)] = metadata.storage_data[MetadataIndex(key)]
            metadata.planner_data[alias] = path_
    return {name: described}, metadata


# ------------------------------------------------------------------------------------------------------- together


def begin(communicator: Communicator, folder: Folder, step: int) -> Draft | None:
    """Begin a checkpoint, and return it as this rank sees it; None if rank 0 has to write it alone. Collective.

    Raises:
        CheckpointError: rank 0 can't begin it.
    """
    draft: Draft | None = None

    def place() -> list[str] | None:
        nonlocal draft
        draft = folder.begin(step)
        return None if draft is None else draft.place

    found = communicator.on_main(place)
    if found is None:
        return None
    why = ""
    if not communicator.is_main:
        try:
            draft = folder.join(found)
        except CheckpointError as error:
            why = str(error)
    answers = communicator.all_gather_data([draft is not None, why])
    reasons = [f"rank {rank} can't write: {said}" for rank, (_, said) in enumerate(answers) if said]
    if reasons and communicator.is_main:
        print_stderr(f"unitrain: rank 0 gathers all shards and writes them alone, since {reasons[0]}")
    return draft if all(sees for sees, _ in answers) else None


def write_own(draft: Draft, rank: int, shards: Shards) -> None:
    """Write the file of a rank other than 0, and tell rank 0 of it, or why it could not be written."""
    try:
        files, metadata = write_shards(draft, rank, shards)
        said = {"files": files, "metadata": base64.b64encode(metadatas.to_bytes(metadata)).decode()}
    except Exception as error:  # pickling may raise any exception
        said = {"error": reason(error)}
    with suppress(OSError, CheckpointError):  # nobody can be told: rank 0 waits in vain, and says so
        draft.tell(rank, json.dumps(said))


def write_all(draft: Draft, shards: Shards, writers: int, patience_s: float) -> dict[str, Any]:
    """Write rank 0's file, wait for the files of other ranks, and write the metadata of all.

    Args:
        draft: the checkpoint.
        shards: what rank 0 writes.
        writers: the number of ranks that write, with rank 0.
        patience_s: how long to wait for each of the others.

    Returns:
        What the manifest says of the files.

    Raises:
        CheckpointError: a rank could not write its file, or not in time; or parts of a tensor are missing.
    """
    files, own = write_shards(draft, 0, shards)
    several = [own]
    for rank in range(1, writers):
        until, pause = time.monotonic() + patience_s, _POLL_S
        while (text := draft.told(rank)) is None:
            if time.monotonic() > until:
                raise CheckpointError(f"rank {rank} has not written its shards within timeout_s ({patience_s:g} s)")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)
        said = json.loads(text)
        if "error" in said:
            raise CheckpointError(f"rank {rank} could not write its shards: {said['error']}")
        files.update(said["files"])
        several.append(metadatas.from_bytes(base64.b64decode(said["metadata"]), f"the metadata of rank {rank}"))
    content = metadatas.to_bytes(metadatas.merged(several))
    draft.store.put(f"{draft.name}/{METADATA}", content)
    return {**files, METADATA: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
