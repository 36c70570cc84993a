"""``save_weights``: writes a model as files of safetensors with an index, in which Hugging Face reads models.

Each file is written by one rank, a tensor at a time, so that no rank has more than a tensor of a sharded model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

import unitrain
from unitrain.checkpoint.sharded.saving import shared_store
from unitrain.checkpoint.store.located import store_at
from unitrain.checkpoint.store.store import Store
from unitrain.communication.communicator import Communicator
from unitrain.communication.comparison import first_reason
from unitrain.communication.state_transfer import Form
from unitrain.errors import CheckpointError, UsageError
from unitrain.features.safetensors.loading import DTYPES, INDEX
from unitrain.training.models.batch_norm import average_statistics
from unitrain.training.models.prepared import Average

NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WHOLE = "model.safetensors"
_PART = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def save_weights(
    strategy: unitrain.Strategy, module: nn.Module, folder: str | Path, *, max_file_size: int = 5 * 10**9
) -> None:
    """Save a model's weights as safetensors, in several files with an index if they are large. Collective.

    With a ``config.json``, transformers' ``from_pretrained`` reads the folder, and so does ``load_weights``. The ranks
    write the files together, and none has more than one whole tensor of a sharded model. Running statistics of
    BatchNorm layers that are not synchronised are averaged over the ranks first. Of an average, such as an EMA, the
    averaged weights are saved.

    An earlier model in the folder is replaced. If that is interrupted, the folder has no model that can be read.

    Args:
        strategy: the strategy of the run.
        module: the model, as ``prepare`` returned it, or an average of it.
        folder: a path, or a URL that fsspec knows.
        max_file_size: number of bytes of tensors in a file. A larger tensor has a file of its own.

    Raises:
        CheckpointError: a file could not be written; on every rank.
        UsageError: the model has something that safetensors can't hold.

    Example:
        >>> save_weights(strategy, model, "models/llama-tuned")
    """
    sockets = strategy._sockets
    swapped = module.swapped() if isinstance(module, Average) else nullcontext(module)
    sockets.replicas.check("save_weights()")
    with swapped as model:
        average_statistics([model], sockets.communicator, sockets.prepared.shares)
        _save(sockets.communicator, sockets.prepared.unwrap(model), folder, max_file_size)


def _save(communicator: Communicator, module: nn.Module, folder: str | Path, max_file_size: int) -> None:
    if max_file_size < 1:
        raise UsageError(f"save_weights: max_file_size is {max_file_size}, but must be at least 1 byte.")
    state = _tensors(module)
    files = _divided(state, max_file_size)
    store = store_at(folder)
    shared = shared_store(communicator, store, "weights")
    store, writers = (store, 1) if shared is None else (shared, communicator.world_size)
    if len(files) > 1:  # until the new index is there, nothing must take new files for old ones
        communicator.on_main(lambda: _remove(store, (_WHOLE, f"model{INDEX}")))
    why = ""
    for first in range(0, len(files), writers):
        why = _write(communicator, store, state, list(files.items())[first : first + writers]) or why
    if why := first_reason(communicator, why and f"rank {communicator.rank}: {why}"):
        raise CheckpointError(f"the weights could not be written to {store}: {why}")
    communicator.on_main(lambda: _finish(store, state, files))


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors to save, by name. A tied weight has its first name only, as Hugging Face expects."""
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or value.dtype not in NAMES or value.layout != torch.strided:
            what = f"{value.dtype}, {value.layout}" if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(f"save_weights: {name} is {what}, which safetensors can't hold: use strategy.save.")
        if id(value) not in seen:
            seen.add(id(value))
            state[name] = value.detach()
    return state


def _divided(state: Mapping[str, Tensor], most: int) -> dict[str, list[str]]:
    """Return the names of the files, with the tensors in each, in order: at most so many bytes, or one tensor."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in state.items():
        if groups[-1] and size + tensor.nbytes > most:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.nbytes
    if len(groups) == 1:
        return {_WHOLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def _write(
    communicator: Communicator, store: Store, state: Mapping[str, Tensor], files: list[tuple[str, list[str]]]
) -> str:
    """Write files, one by each of the first ranks, and return why this rank's could not be written. Collective."""
    rank = communicator.rank
    tensors = _in_turns(communicator, state, [names for _, names in files])
    why = ""
    if rank < len(files):
        file, names = files[rank]
        try:
            with store.draft(file) as draft, open(draft, "wb") as output:
                write_tensors(output, {name: state[name] for name in names}, tensors)
        except (OSError, CheckpointError) as error:
            why = store.reason(error)
    # A rank whose disk is full must not leave the others waiting.
    for _ in tensors:  # which other ranks gather, too
        pass
    return why


def _in_turns(communicator: Communicator, state: Mapping[str, Tensor], groups: list[list[str]]) -> Iterator[Tensor]:
    """Yield the whole tensors of this rank's group. All ranks gather the next sharded one of each group together."""
    for names in zip_longest(*groups):
        mine = None
        for rank, name in enumerate(names):
            if name is not None and (rank == communicator.rank or communicator.sharding.is_sharded(state[name])):
                whole = communicator.sharding.full_tensor(state[name])
                mine = whole if rank == communicator.rank else mine
        if mine is not None:
            yield mine


def write_tensors(file: BinaryIO, forms: Mapping[str, Tensor | Form], tensors: Iterable[Tensor]) -> None:
    """Write a file of safetensors.

    Args:
        file: the file.
        forms: the form of each tensor, by name.
        tensors: the tensors in this order, each of which is needed only until the next.

    Raises:
        UsageError: safetensors can't hold one of them.
    """
    for name, form in forms.items():
        if form.dtype not in NAMES:
            raise UsageError(f"{name} is {form.dtype}, which safetensors can't hold: write a .pt file instead.")
    file.write(_header(forms))
    for tensor in tensors:
        file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _header(state: Mapping[str, Tensor | Form]) -> bytes:
    """Return the beginning of a file with tensors of these forms, in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, form in state.items():
        start, end = end, end + torch.Size(form.shape).numel() * form.dtype.itemsize
        entries[name] = {"dtype": NAMES[form.dtype], "shape": list(form.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # so that readers can map the tensors, which begin here
    return len(text).to_bytes(8, "little") + text


def _finish(store: Store, state: Mapping[str, Tensor], files: Mapping[str, list[str]]) -> None:
    """Write the index of several files, and remove the files of a model that was there before."""
    with store.explained(f"weights can't be written to {store}"):
        index = f"model{INDEX}"
        if len(files) > 1:
            total = sum(tensor.nbytes for tensor in state.values())
            names = {name: file for file, group in files.items() for name in group}
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2)
            store.put(index, text.encode())
        kept = {*files, index} if len(files) > 1 else {*files}
        _remove(store, [file for file in store.list() if _PART.fullmatch(file) and file not in kept])


def _remove(store: Store, names: Iterable[str]) -> None:
    for name in names:
        store.remove(name)
