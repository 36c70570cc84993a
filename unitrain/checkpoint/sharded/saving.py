"""Sharded state is written by all ranks, in the format of torch.distributed.checkpoint (DCP): each writes its own file.

No process group is needed. What a rank writes follows from its own state, so there is no plan to agree on. Ranks write
in the background, where there are no collectives: each leaves the layout of its file for rank 0, which joins them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple
from uuid import uuid4

import torch
from torch import Tensor

from unitrain.checkpoint.names import (
    GROUPS,
    PARAMS,
    STATE,
    Keys,
    Name,
    flat_options,
    joined,
    keys_of,
    optimizer_values,
)
from unitrain.checkpoint.sharded.dcp import METADATA, Entry, Layout, Piece, Region, merged, to_bytes, write
from unitrain.checkpoint.store.folder import Draft
from unitrain.checkpoint.store.located import store_at
from unitrain.checkpoint.store.store import Store
from unitrain.checkpoint.store.torch_files import reason, write_part
from unitrain.communication.communicator import Communicator
from unitrain.communication.state_transfer import SentState, needed, outline, own_rows
from unitrain.data.structure import rebuilt
from unitrain.errors import CheckpointError
from unitrain.process import print_stderr

_POLL_S, _LONGEST_POLL_S = 0.005, 1.0


class Shards(NamedTuple):
    """What a rank writes of the states of modules and optimizers, by key."""

    values: dict[str, Any]  # rows of a tensor, or plain data
    entries: dict[str, Entry]  # what they are parts of. None is written yet
    first_rows: dict[str, int]  # the number of the first row of a tensor that this rank has
    aliases: dict[str, tuple[Keys, str]]  # further keys of values, with a path and the key in ``values``


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
    return [one if one == -other else None for one, other in zip(last, first, strict=True)]


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
    for rank in sorted({one for one in ranks if one is not None}):
        mine = {n: states[n] for n, one in enumerate(ranks) if one == rank and n in states}
        states.update(of_rank(communicator, rank, mine))
    # Of a parameter that no rank has a state of, there is only the rank that would have it.
    return {**value, STATE: {number: its for number, its in states.items() if isinstance(its, dict)}}


def of_rank(communicator: Communicator, rank: int, state: Any) -> Any:
    """Return a rank's nested state on rank 0. Collective. The result of other ranks than these two can't be used."""
    expected = communicator.broadcast_object(outline(state), rank)
    own = state if rank == communicator.rank else None
    new = needed(lambda path: communicator.is_main)
    return SentState(communicator, expected, own, src=rank).receive(into=own, new=new)


def divided(
    communicator: Communicator,
    parts: Mapping[str, Any],
    modules: Iterable[str],
    optimizers: Mapping[str, list[Name] | None],
) -> tuple[dict[str, Any], Shards]:
    """Return the states that rank 0 writes alone, and what this rank writes of modules and optimizers. Collective.

    Args:
        communicator: the communicator of this process.
        parts: this rank's states by key.
        modules: the keys of modules.
        optimizers: the keys of optimizers, with the names of their parameters.
    """
    shards = Shards({}, {}, {}, {})
    plain: dict[Keys, Any] = {}
    modules = tuple(modules)
    for name in modules:
        _add(communicator, shards, plain, (((name, key), value) for key, value in parts[name].items()), {})
    for name, names in optimizers.items():
        its = parts[name]
        keys = keys_of(names, sum(len(group["params"]) for group in its["param_groups"]))
        ranks = dict(zip(keys, owners(communicator, its[STATE], len(keys)), strict=True))
        _add(communicator, shards, plain, optimizer_values(name, its, keys), ranks)
        if communicator.is_main:
            shards.aliases.update((joined(path), (path, joined(to))) for path, to in flat_options(name, its, keys))
    if not communicator.sharding.of_parameters:
        # All plain values are in rank 0's file, since rank 0 reads them when a run is resumed.
        for own in communicator.all_gather_object(plain):
            plain.update(own)
    for path, value in plain.items() if communicator.is_main else ():
        shards.values[joined(path)], shards.entries[joined(path)] = value, Entry(path, None, (), [])
    return {name: its for name, its in parts.items() if name not in (*modules, *optimizers)}, shards


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
        sharded = communicator.sharding.is_sharded(value)
        if not sharded and owner != communicator.rank:
            continue
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
            plain[path] = value
            continue
        local, first = own_rows(communicator, value) if sharded else (value, 0)
        if local.numel() or (communicator.is_main and not value.numel()):
            key = joined(path)
            dtype = str(value.dtype).removeprefix("torch.")
            shards.values[key], shards.entries[key] = local.detach(), Entry(path, dtype, tuple(value.shape), [])
            shards.first_rows[key] = first


def write_shards(draft: Draft, rank: int, shards: Shards) -> tuple[dict[str, Any], Layout]:
    """Write a rank's file from host memory, and return what the manifest says of it, and its layout."""
    layout: Layout = {}
    if not shards.values:
        return {}, layout
    name = f"__{rank}_0.distcp"  # as torch names it

    def save(values: dict[str, Any], output: BinaryIO) -> None:
        for key, value in values.items():
            pieces = list(write(output, name, value, shards.first_rows.get(key)))
            layout[key] = shards.entries[key]._replace(pieces=pieces)

    with draft.store.draft(f"{draft.name}/{name}") as file:
        described = write_part(file, shards.values, lambda: draft.store.put(f"{draft.name}/{name}", file), save)
    layout.update((alias, layout[key]._replace(path=to)) for alias, (to, key) in shards.aliases.items())
    return {name: described}, layout


def shared_store(communicator: Communicator, store: Store, what: str = "checkpoints") -> Store | None:
    """Return the store that rank 0 writes to, as this rank sees it; None if rank 0 has to write alone. Collective."""
    mark = f"{uuid4().hex}.tmp"

    def leave_mark() -> tuple[str, str]:
        with store.explained(f"{what} can't be written to {store}"):
            store.make()
            store.put(mark, b"x")
        return store.location, mark

    found = communicator.on_main(lambda: None if store.few_writes else leave_mark())
    if found is None:
        return None
    seen, sees, why = store, True, ""
    if not communicator.is_main:
        seen = store_at(found[0])
        try:
            seen.size(found[1])
        except OSError:
            sees = False
        except CheckpointError as error:
            sees, why = False, str(error)
    answers = communicator.all_gather_data([sees, why])
    communicator.on_main(lambda: store.remove(mark))
    reasons = [f"rank {rank} can't write: {said}" for rank, (_, said) in enumerate(answers) if said]
    if reasons and communicator.is_main:
        print_stderr(f"unitrain: rank 0 gathers all shards and writes them alone, since {reasons[0]}")
    return seen if all(one for one, _ in answers) else None


def write_own(draft: Draft, rank: int, shards: Shards) -> None:
    """Write the file of a rank other than 0, and tell rank 0 of it, or why it could not be written."""
    try:
        files, layout = write_shards(draft, rank, shards)
        said = json.dumps({"files": files, "layout": layout})
    except Exception as error:  # pickling may raise any exception
        said = json.dumps({"error": reason(error)})
    with suppress(OSError, CheckpointError):  # nobody can be told: rank 0 waits in vain, and says so
        draft.store.put(_message(draft, rank), said.encode())


def write_all(draft: Draft, shards: Shards, writers: int, patience_s: float) -> dict[str, Any]:
    """Write rank 0's file, wait for the other writers, and write the metadata. Return the files for the manifest.

    Raises CheckpointError if a rank could not write its file, or not in time, or parts of a tensor are missing.
    """
    files, own = write_shards(draft, 0, shards)
    return joined_files(
        draft, [{"files": files, "layout": own}, *(_told(draft, r, patience_s) for r in range(1, writers))]
    )


def joined_files(draft: Draft, said: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Write the metadata of what ranks say that they have written, if it has a layout. Return the manifest's files."""
    files: dict[str, Any] = {}
    layouts: list[Layout] = []
    for one in said:
        files.update(one["files"])
        layouts.append({key: _entry(*entry) for key, entry in one["layout"].items()})
    if not any(layouts):
        return files
    content = to_bytes(merged(layouts))
    draft.store.put(f"{draft.name}/{METADATA}", content)
    return {**files, METADATA: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}}


def _told(draft: Draft, rank: int, patience_s: float) -> dict[str, Any]:
    """Return what another rank says of its file."""
    until, pause, said = time.monotonic() + patience_s, _POLL_S, None
    while said is None:
        with suppress(FileNotFoundError):
            said = json.loads(draft.store.get(_message(draft, rank)))
            break
        if time.monotonic() > until:
            raise CheckpointError(f"rank {rank} has not written its shards within timeout_s ({patience_s:g} s)")
        time.sleep(pause)
        pause = min(1.1 * pause, _LONGEST_POLL_S)
    draft.store.remove(_message(draft, rank))
    if "error" in said:
        raise CheckpointError(f"rank {rank} could not write its shards: {said['error']}")
    return dict(said)


def _message(draft: Draft, rank: int) -> str:
    return f"{draft.name}/rank-{rank}.json"


def _entry(path: list[Any], dtype: str | None, shape: list[int], pieces: list[Any]) -> Entry:
    """Return the entry of a layout that was sent as JSON."""
    found = [Piece(Region(tuple(offsets), tuple(sizes)), *where) for (offsets, sizes), *where in pieces]
    return Entry(tuple(path), dtype, tuple(shape), found)
