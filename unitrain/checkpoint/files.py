"""``strategy.save`` and ``strategy.load``: files written and read by rank 0."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from torch import nn

from unitrain.checkpoint.sharded.shards import gather_shards
from unitrain.checkpoint.snapshot import on_host
from unitrain.checkpoint.weights.mapped import MappedFiles
from unitrain.checkpoint.weights.reading import reason
from unitrain.checkpoint.writing import check_part, write_part
from unitrain.communication.communicator import Communicator
from unitrain.communication.streaming import outline, receive
from unitrain.errors import CheckpointError, UsageError
from unitrain.training.batch_norm import layers as batch_norm
from unitrain.training.models.prepared import PreparedModules
from unitrain.url import parsed

if TYPE_CHECKING:
    from unitrain.checkpoint.store.remote_files import RemoteFiles


def save(communicator: Communicator, prepared: PreparedModules, value: Any, path: str | Path) -> None:
    """See ``Strategy.save``."""
    place = _file_at(path)
    modules = list(_modules(value))
    if len(set(communicator.all_gather_object(len(modules)))) > 1:
        raise UsageError("save() got modules on some ranks only: pass the same objects on every rank.")
    # Rank 0's state is written, so its running statistics must cover the samples of all ranks.
    batch_norm.average_statistics(modules, communicator, prepared.shares)
    states = gather_shards(communicator, _states(prepared, value)) if communicator.shards else None

    def write() -> None:
        try:
            _write(on_host(_states(prepared, value) if states is None else states), place)
        except CheckpointError:
            raise
        except Exception as error:  # pickling may raise any exception
            raise CheckpointError(f"{path} could not be written: {reason(error)}") from error

    communicator.on_main(write)


def load(communicator: Communicator, path: str | Path) -> Any:
    """See ``Strategy.load``."""
    place = _file_at(path)
    files, value = MappedFiles(), None

    def read() -> Any:
        nonlocal value
        try:
            value = _read(place, files)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} does not exist.") from error
        except CheckpointError:
            raise
        except Exception as error:  # torch.load raises many kinds of exceptions for a broken file
            raise CheckpointError(f"{path} could not be read: {reason(error)}") from error
        return outline(value)

    return receive(communicator, communicator.on_main(read), value, sent=files.release)


def _modules(value: Any) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, dict):
        yield from _modules(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _modules(item)


def _states(prepared: PreparedModules, value: Any) -> Any:
    """Replace objects that have a state by it. Keys have no prefixes of wrappers."""
    if isinstance(value, nn.Module):
        return prepared.unwrap(value).state_dict()
    if callable(getattr(value, "state_dict", None)):
        return value.state_dict()
    if isinstance(value, dict):
        return {key: _states(prepared, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_states(prepared, item) for item in value)
    return value


def _file_at(path: str | Path) -> Path | str:
    place = parsed(path)
    if isinstance(place, str) and re.fullmatch(r".*(/|://[^/]*)", place):
        raise UsageError(f"{path} is the URL of a folder: name a file in it, such as {place.rstrip('/')}/model.pt.")
    return place


def _read(place: Path | str, files: MappedFiles) -> Any:
    if isinstance(place, Path):
        return files.load(place)
    remote, name = _remote(place)
    with tempfile.TemporaryDirectory(prefix="unitrain-") as temporary:
        file = Path(temporary, "file")
        remote.download(name, file)
        return files.load(file)  # stays readable without a name


def _write(value: Any, place: Path | str) -> None:
    if isinstance(place, Path):
        _write_file(value, place)
        return
    remote, name = _remote(place)
    with tempfile.TemporaryDirectory(prefix="unitrain-") as temporary:
        file = Path(temporary, "file")
        try:
            write_part(file, value)
            check_part(file)
        except OSError as error:
            raise CheckpointError(f"{place} could not be written: {remote.reason(error)}") from error
        remote.upload(file, name)


def _remote(url: str) -> tuple[RemoteFiles, str]:
    """Return the files of the folder that the URL of a file names, and the file's name."""
    from unitrain.checkpoint.store.remote_files import RemoteFiles  # and fsspec

    folder, _, name = url.rpartition("/")
    return RemoteFiles(folder), name


def _write_file(value: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
        # Report now, and not when it is needed, that a file can't be loaded. This does not read tensor data.
        torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
