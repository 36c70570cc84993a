"""``strategy.load_weights``: fills a prepared model from files of safetensors, of which no rank holds all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from unitrain.checkpoint.store.located import store_at
from unitrain.checkpoint.weights.safetensors import WeightFiles
from unitrain.communication.communicator import Communicator
from unitrain.communication.streaming import Form, broadcast_tensors, own_rows
from unitrain.errors import CheckpointError, UsageError
from unitrain.training.models.prepared import PreparedModules
from unitrain.url import parsed


def load_weights(communicator: Communicator, prepared: PreparedModules, module: nn.Module, path: str | Path) -> None:
    """See ``Strategy.load_weights``."""
    place = parsed(path)
    if module not in prepared:
        raise UsageError("load_weights needs a prepared model: call it after prepare().")
    plain = prepared.unwrap(module)
    files: WeightFiles | None = None

    def read() -> tuple[str, list[str], list[str], dict[str, Form]]:
        nonlocal files
        files = WeightFiles.at(place)
        return files.store.location, files.names, files.digests, files.forms()

    location, names, digests, forms = communicator.on_main(read)
    targets = _targets(plain, forms, path)
    if communicator.shards_parameters:
        if files is None:
            files = _seen(location, names, digests)
        if all(communicator.all_gather_data(files is not None)):
            assert files is not None
            # Each reads its own part. What every rank needs whole is sent instead: a disk serves one reader faster.
            for name, target in targets.items():
                if communicator.is_sharded(target):
                    _copy_rows(communicator, target, files, name)
            targets = {name: target for name, target in targets.items() if not communicator.is_sharded(target)}
    sources = map(files.whole, targets) if files is not None else iter(())
    release = files.release if files is not None else lambda: None
    broadcast_tensors(communicator, list(targets.values()), sources, sent=release)
    prepared.allow_calls(plain)


def _seen(location: str, names: list[str], digests: list[str]) -> WeightFiles | None:
    """Return the files that rank 0 has found, on another rank; None if it does not see the same."""
    try:
        files = WeightFiles(store_at(parsed(location)), names)
        return files if files.digests == digests else None
    except CheckpointError:
        return None


@torch.no_grad()
def _copy_rows(communicator: Communicator, target: Tensor, files: WeightFiles, name: str) -> None:
    """Overwrite this rank's shard of a tensor, a piece at a time. Not collective."""
    shard, first = own_rows(communicator, target)
    if not shard.numel():
        return
    step = max(1, files.piece_bytes * len(shard) // shard.nbytes)
    for start in range(0, len(shard), step):
        part = shard[start : start + step]
        part.copy_(files.rows(name, first + start, first + start + len(part)))
        files.release()


def _targets(module: nn.Module, saved: Mapping[str, Form], path: str | Path) -> dict[str, Tensor]:
    """Return the tensors to fill, by their names in the file. Raises CheckpointError if names or shapes differ."""
    own = {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    aliases: dict[int, list[str]] = {}  # of a weight that is tied, the file may have one name
    for name, tensor in own.items():
        aliases.setdefault(id(tensor), []).append(name)
    targets, wrong = {}, [f"{name} is not in the model" for name in saved if name not in own]
    for names in aliases.values():
        name = next((name for name in names if name in saved), names[0])
        tensor = own[name]
        if name not in saved:
            wrong.append(f"{name} is missing")
        elif tuple(tensor.shape) != saved[name].shape:
            wrong.append(f"{name} is {saved[name].shape}, but {tuple(tensor.shape)} in the model")
        else:
            targets[name] = tensor
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(f"{path} has weights of another model: {'; '.join(wrong[:3])}{more}. Nothing was loaded.")
    return targets
