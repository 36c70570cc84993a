"""``strategy.save`` and ``strategy.load``: files written and read by rank 0."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import nn

from unitrain.checkpoint.sharded.saving import gathered
from unitrain.checkpoint.store.located import file_at, readable
from unitrain.checkpoint.store.store import Store
from unitrain.checkpoint.store.torch_files import MappedFiles, plain
from unitrain.checkpoint.writer import on_host
from unitrain.communication.communicator import Communicator
from unitrain.communication.state_transfer import SentState, leaves, outline
from unitrain.communication.structure import rebuilt
from unitrain.errors import UsageError
from unitrain.training.models import batch_norm
from unitrain.training.models.prepared import PreparedModules
from unitrain.url import parsed


def save(communicator: Communicator, prepared: PreparedModules, value: Any, path: str | Path) -> None:
    """See ``Strategy.save``."""
    store, name = _file_at(path)
    modules = [leaf for _, leaf in leaves(value) if isinstance(leaf, nn.Module)]
    if len(set(communicator.all_gather_object(len(modules)))) > 1:
        raise UsageError("save() got modules on some ranks only: pass the same objects on every rank.")
    # Rank 0's state is written, so its running statistics must cover the samples of all ranks.
    batch_norm.average_statistics(modules, communicator, prepared.shares)
    # Here, since all ranks take part, and only rank 0 writes.
    states = gathered(communicator, _states(prepared, value)) if communicator.sharding.any else None

    def write() -> None:
        content = on_host(_states(prepared, value) if states is None else states)
        with store.explained(f"{path} could not be written"):
            store.make()
            store.write(name, content)

    communicator.on_main(write)


def load(communicator: Communicator, path: str | Path) -> Any:
    """See ``Strategy.load``."""
    store, name = _file_at(path)
    files, value = MappedFiles(), None

    def read() -> Any:
        nonlocal value
        with store.explained(f"{path} could not be read"), readable(str(path)), store.file(name) as file:
            value = files.load(file)
        return outline(value)

    return SentState(communicator, communicator.on_main(read), value, sent=files.release).receive()


def _states(prepared: PreparedModules, value: Any) -> Any:
    """Return nested values with states in place of the objects that have one. Keys have no prefixes of wrappers."""

    def state(leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            return prepared.unwrap(leaf).state_dict()
        return leaf.state_dict() if callable(getattr(leaf, "state_dict", None)) else plain(leaf)

    return rebuilt(value, state)


def _file_at(path: str | Path) -> tuple[Store, str]:
    place = parsed(path)
    if isinstance(place, str) and re.fullmatch(r".*(/|://[^/]*)", place):
        raise UsageError(f"{path} is the URL of a folder: name a file in it, such as {place.rstrip('/')}/model.pt.")
    return file_at(place)
