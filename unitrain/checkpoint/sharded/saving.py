"""Sharded state is written by all ranks, in the format of torch.distributed.checkpoint (DCP): each writes its own file.

No process group is needed. What a rank writes follows from its own state, so there is no plan to agree on. Ranks write
in the background, where there are no collectives: each leaves a note of its file for rank 0, which joins them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple
from uuid import uuid4

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from unitrain.checkpoint.names import GROUPS, PARAMS, STATE, named_state
from unitrain.checkpoint.sharded.dcp import METADATA, Keys, Piece, to_bytes, write
from unitrain.checkpoint.store.folder import Draft
from unitrain.checkpoint.store.located import store_at
from unitrain.checkpoint.store.store import Store
from unitrain.checkpoint.store.torch_files import write_part
from unitrain.communication.communicator import Communicator
from unitrain.communication.comparison import first_reason
from unitrain.communication.state_transfer import SentState, needed, outline, own_rows
from unitrain.communication.structure import rebuilt
from unitrain.errors import CheckpointError
from unitrain.process import print_stderr

NOTE = "rank-{}.json"
"""The name of the file in which a rank tells another one what it has written."""
_POLL_S, _LONGEST_POLL_S = 0.005, 1.0


class Shards(NamedTuple):
    """A rank's parts of the states of modules and optimizers."""

    values: list[Any]  # rows of a tensor, or plain data
    places: list[Piece]  # what the values are parts of. None is written yet


class Portion(NamedTuple):
    """A rank's portion of a checkpoint."""

    parts: dict[str, Any]  # the states by key that rank 0 writes alone
    shards: Shards = Shards([], [])

    def copied(self, copy: Callable[[Any], Any]) -> Portion:
        """Return the portion with copies of its tensors, given a function that copies nested state."""
        parts, values = copy((self.parts, self.shards.values))
        return Portion(parts, self.shards._replace(values=values))


def owners(communicator: Communicator, state: Mapping[int, Any], parameters: int) -> list[int | None]:
    """Return which rank has the state of each parameter of an optimizer; None if every rank has it. Collective.

    In ``state``, by the numbers of parameters, one that another rank has is no dict.
    """
    if not communicator.sharding.of_optimizers:
        return [None] * parameters
    here = torch.tensor([isinstance(state.get(number, {}), dict) for number in range(parameters)])
    rank, world = communicator.rank, communicator.world_size
    bounds = torch.stack([torch.where(here, rank, -1), torch.where(here, -rank, -world)])
    last, first = communicator.all_reduce(bounds, "max").tolist()  # of the ranks that have it; the first is negated
    return [rank if rank == -lowest else None for rank, lowest in zip(last, first, strict=True)]


def gathered(communicator: Communicator, state: Any) -> Any:
    """Return nested state with the full tensors on the CPU in place of parts, on rank 0. Collective.

    On the other ranks at most one tensor is whole at a time, and the result can't be used.
    """

    def full(value: Any) -> Any:
        if not communicator.sharding.is_sharded(value):
            return value
        whole = communicator.sharding.full_tensor(value)
        return whole.cpu() if communicator.is_main else None

    return rebuilt(_with_states(communicator, state), full)


def _with_states(communicator: Communicator, value: Any) -> Any:
    """Return nested state with the states that other ranks have, in the states of optimizers, on rank 0."""
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_with_states(communicator, item) for item in value)
    if not isinstance(value, dict):
        return value
    if not value.keys() >= {STATE, GROUPS}:
        return {key: _with_states(communicator, item) for key, item in value.items()}
    states = dict(value[STATE])
    ranks = owners(communicator, states, sum(len(group[PARAMS]) for group in value[GROUPS]))
    for rank in sorted({owner for owner in ranks if owner is not None}):
        mine = {number: states[number] for number, owner in enumerate(ranks) if owner == rank and number in states}
        states.update(of_rank(communicator, rank, mine))
    # Of a parameter that no rank has a state of, there is only the rank that would have it.
    return {**value, STATE: {number: state for number, state in states.items() if isinstance(state, dict)}}


def of_rank(communicator: Communicator, rank: int, state: Any) -> Any:
    """Return a rank's nested state on rank 0. Collective. The result of other ranks than these two can't be used."""
    expected = communicator.broadcast_object(outline(state), rank)
    source = state if rank == communicator.rank else None
    new = needed(lambda path: communicator.is_main)
    return SentState(communicator, expected, source, src=rank).receive(into=source, new=new)


def divided(
    communicator: Communicator,
    parts: Mapping[str, Any],
    modules: Iterable[str],
    optimizers: Mapping[str, list[str]],
) -> Portion:
    """Split states into those that rank 0 writes and this rank's shards of modules and optimizers. Collective.

    Args:
        communicator: the communicator of this process.
        parts: this rank's states by key.
        modules: the keys of modules.
        optimizers: the keys of optimizers, with the names of their parameters.
    """
    if not communicator.sharding.any:
        return Portion(dict(parts))
    from torch.distributed.checkpoint import DefaultSavePlanner

    shards, plain, modules = Shards([], []), dict[Keys, Any](), tuple(modules)
    for name in modules:
        _add(communicator, shards, plain, (((name, key), value) for key, value in parts[name].items()), {})
    for name, names in optimizers.items():
        ranks = dict(zip(names, owners(communicator, parts[name][STATE], len(names)), strict=True))
        planner = DefaultSavePlanner(flatten_sharded_tensors=False)
        planner.set_up_planner({name: named_state(parts[name], names)})
        values = ((planner.mappings[key], value) for key, value in planner.state_dict.items())
        _add(communicator, shards, plain, values, ranks)
    if not communicator.sharding.of_parameters:
        # All plain values are in rank 0's file, since rank 0 reads them when a run is resumed.
        for of_rank in communicator.all_gather_object(plain):
            plain.update(of_rank)
    for path, value in plain.items() if communicator.is_main else ():
        shards.values.append(value)
        shards.places.append(Piece(path, None))
    return Portion({name: state for name, state in parts.items() if name not in (*modules, *optimizers)}, shards)


def _add(
    communicator: Communicator,
    shards: Shards,
    plain: dict[Keys, Any],
    values: Iterable[tuple[Keys, Any]],
    ranks: Mapping[str, int | None],
) -> None:
    """Add this rank's parts of values, and plain data to ``plain``, given which rank has a parameter's state."""
    for path, value in values:
        owner = (ranks.get(path[2]) or 0) if path[1] == STATE else 0
        sharded = communicator.sharding.is_sharded(value)
        if not sharded and owner != communicator.rank:
            continue
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
            plain[path] = value
            continue
        local, first = own_rows(communicator, value) if sharded else (value, 0)
        if local.numel() or (communicator.is_main and not value.numel()):
            offsets = (first, *[0] * local.dim())[: local.dim()]
            dtype = str(value.dtype).removeprefix("torch.")
            shards.values.append(local.detach())
            shards.places.append(Piece(path, dtype, tuple(value.shape), offsets))


def write_shards(draft: Draft, rank: int, shards: Shards) -> dict[str, Any]:
    """Write a rank's file from host memory, if it has parts. Return a note of it, as JSON has it.

    Returns:
        The file's entry in the manifest under ``files``, and under ``pieces``, where in it each part is.
    """
    pieces: list[Piece] = []
    if not shards.values:
        return {"files": {}, "pieces": pieces}
    name = f"__{rank}_0.distcp"  # as torch names it

    def save(output: BinaryIO) -> None:
        for value, place in zip(shards.values, shards.places, strict=True):
            pieces.extend(write(output, value, place._replace(file=name)))

    with draft.store.draft(f"{draft.name}/{name}") as file:
        described = write_part(file, save)
    return {"files": {name: described}, "pieces": pieces}


def shared_store(communicator: Communicator, store: Store) -> Store | None:
    """Return the store that rank 0 writes to, as this rank sees it; None if rank 0 has to write alone. Collective."""

    def leave_mark() -> tuple[str, str] | None:
        if store.few_writes:
            return None
        mark = f"{uuid4().hex}.tmp"
        with store.explained(f"checkpoints can't be written to {store}"):
            store.make()
            store.put(mark, b"x")
        return store.location, mark

    place = communicator.on_main(leave_mark)
    if place is None:
        return None
    location, mark = place
    seen: Store | None = store
    why = ""
    if not communicator.is_main:
        try:
            seen = store_at(location)
            seen.size(mark)
        except OSError:
            seen = None
        except CheckpointError as error:  # of an object store: it can't be reached, or this rank may not use it
            seen, why = None, f"rank {communicator.rank} can't write: {error}"
    is_shared = all(communicator.all_gather_data(seen is not None))
    why = first_reason(communicator, why)
    communicator.on_main(lambda: store.remove(mark))
    if why and communicator.is_main:
        print_stderr(f"unitrain: rank 0 gathers all shards and writes them alone, since {why}")
    return seen if is_shared else None


def write_own(draft: Draft, rank: int, shards: Shards) -> None:
    """Write the file of a rank other than 0, and leave a note of it for rank 0, or why it could not be written."""
    try:
        note = json.dumps(write_shards(draft, rank, shards))
    except Exception as error:  # pickling may raise any exception
        note = json.dumps({"error": draft.store.reason(error)})
    with suppress(OSError, CheckpointError):  # nobody can be told: rank 0 waits in vain, and says so
        draft.store.put(f"{draft.name}/{NOTE.format(rank)}", note.encode())


def write_all(draft: Draft, shards: Shards, writers: int, patience_s: float) -> dict[str, Any]:
    """Write rank 0's file, wait for the other writers, and write the metadata. Return the files for the manifest.

    Raises CheckpointError if a rank could not write its file, or not in time, or parts of a tensor are missing.
    """
    notes = [write_shards(draft, 0, shards)]
    for rank in range(1, writers):
        notes.append(awaited_note(draft, rank, patience_s))
        draft.store.remove(f"{draft.name}/{NOTE.format(rank)}")
        if "error" in notes[-1]:
            raise CheckpointError(f"rank {rank} could not write its shards: {notes[-1]['error']}")
    return joined_files(draft, notes)


def joined_files(draft: Draft, notes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the ranks' notes of their files: write the metadata, if there are pieces. Return the manifest's files."""
    files: dict[str, Any] = {}
    pieces: list[Piece] = []
    for note in notes:
        files.update(note["files"])
        pieces.extend(note["pieces"])
    if not pieces:
        return files
    content = to_bytes(pieces)
    draft.store.put(f"{draft.name}/{METADATA}", content)
    return {**files, METADATA: {"size": len(content), "xxh3": xxh3_128_hexdigest(content)}}


def awaited_note(draft: Draft, rank: int, patience_s: float) -> dict[str, Any]:
    """Wait for another rank's note of its file. Raises CheckpointError if there is none after ``patience_s``."""
    until, pause = time.monotonic() + patience_s, _POLL_S
    while True:
        with suppress(FileNotFoundError):
            return dict(json.loads(draft.store.get(f"{draft.name}/{NOTE.format(rank)}")))
        if time.monotonic() > until:
            raise CheckpointError(f"rank {rank} has not written its shards within timeout_s ({patience_s:g} s)")
        time.sleep(pause)
        pause = min(1.1 * pause, _LONGEST_POLL_S)  # each look at an object store is a request, which costs money
