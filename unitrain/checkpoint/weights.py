"""``strategy.load_weights``: fills a prepared model from files of safetensors, of which no rank holds all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from unitrain.checkpoint.mapped import MappedFiles
from unitrain.checkpoint.safetensors import files_at, tensors_in
from unitrain.communicator import Communicator
from unitrain.errors import CheckpointError, UsageError
from unitrain.training.prepared import PreparedModules
from unitrain.training.streaming import Form, broadcast_tensors, copy_own, outline
from unitrain.url import is_url


def load_weights(communicator: Communicator, prepared: PreparedModules, module: nn.Module, path: str | Path) -> None:
    """See ``Strategy.load_weights``."""
    if is_url(path):
        raise UsageError(f"{path} is a URL, but load_weights reads files: download them first, on every host.")
    if module not in prepared:
        raise UsageError("load_weights needs a prepared model: call it after prepare().")
    plain = prepared.unwrap(module)
    files = MappedFiles()
    saved: dict[str, Tensor] = {}

    def read() -> tuple[list[str], dict[str, Form], list[str]]:
        found = files_at(Path(path))
        saved.update(_tensors_in(found, files))
        return list(map(str, found)), outline(saved), [_digest(one) for one in found]

    names, forms, digests = communicator.on_main(read)
    targets = _targets(plain, forms, path)
    if communicator.shards_parameters and _all_see(communicator, names, digests):
        # Each reads its own part. What every rank needs whole is sent instead: a disk serves one reader faster.
        if not communicator.is_main:
            saved = _tensors_in([Path(name) for name in names], files)
        for name, target in targets.items():
            if communicator.is_sharded(target):
                copy_own(communicator, target, saved[name], copied=files.release)
        targets = {name: target for name, target in targets.items() if not communicator.is_sharded(target)}
    sources = [saved[name] for name in targets] if communicator.is_main else []
    broadcast_tensors(communicator, list(targets.values()), sources, sent=files.release)
    waiting = prepared.without_weights.pop(plain, None)
    if waiting is not None:
        waiting.end()


def _tensors_in(paths: Sequence[Path], files: MappedFiles) -> dict[str, Tensor]:
    return {name: tensor for path in paths for name, tensor in tensors_in(path, files).items()}


def _all_see(communicator: Communicator, names: Sequence[str], digests: Sequence[str]) -> bool:
    """Return whether every rank sees the same files. Collective."""
    try:
        own = [_digest(Path(name)) for name in names]
    except OSError:
        own = []
    return all(communicator.all_gather_data(own == digests))


def _digest(path: Path) -> str:
    """Return a digest of a file's size and of the beginning of its header."""
    with open(path, "rb") as file:
        return hashlib.sha256(f"{path.stat().st_size} ".encode() + file.read(2**20)).hexdigest()


def _targets(module: nn.Module, saved: Mapping[str, Form], path: str | Path) -> dict[str, Tensor]:
    """Return the tensors to fill, by the names that they have in the file.

    Raises:
        CheckpointError: names or shapes differ.
    """
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
