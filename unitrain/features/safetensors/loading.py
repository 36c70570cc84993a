"""``load_weights``: fills a prepared model from files of safetensors, of which no rank holds all.

A file has a header in JSON, and the bytes of tensors. The library safetensors can't read parts from an object store, so
the header is read here, which is all that the library would do for a file on a disk.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import unitrain
from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.located import file_at, readable, store_at
from unitrain.checkpoint.store.store import Store
from unitrain.checkpoint.store.torch_files import MappedFiles, viewed
from unitrain.communication.communicator import Communicator
from unitrain.communication.state_transfer import BUFFER_BYTES, Form, broadcast_tensors, own_rows
from unitrain.errors import CheckpointError, UsageError
from unitrain.training.models.prepared import PreparedModules
from unitrain.url import parsed

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
INDEX = ".safetensors.index.json"
_PREFIXES = ("module.", "_orig_mod.")  # of DDP and DataParallel, and of torch.compile
_LARGEST_HEADER = 10**8  # bytes, as in the library safetensors
_OF_TORCH = (b"PK\x03\x04", b"\x80\x02")  # an archive, or the pickle of a torch before 1.6
_BEGINNING = 2**20  # bytes, in which most headers fit: one request for each file
_REQUEST = 2**25  # bytes: a request takes as long as a few MB


def load_weights(strategy: unitrain.Strategy, module: nn.Module, path: str | Path) -> None:
    """Fill a prepared model with the weights in files of safetensors. Collective.

    Of a sharded model, each rank reads its own part, if all ranks see the files. Else rank 0 reads them, a piece at a
    time. Values are converted to the dtypes of the model.

    Args:
        strategy: the strategy of the run.
        module: the model, as ``prepare`` returned it. It may have been built on the meta device.
        path: a file such as ``model.safetensors``, an index of several as Hugging Face writes them
            (``model.safetensors.index.json``), or a folder with one of these; a path, or a URL that fsspec knows.

    Raises:
        CheckpointError: a file can't be read, or names or shapes are not the model's; on every rank.
        UsageError: the model is not prepared.

    Example:
        >>> with torch.device("meta"):
        ...     model = Transformer(config)
        >>> model = strategy.prepare(model)
        >>> load_weights(strategy, model, "models/llama")
    """
    sockets = strategy._sockets
    sockets.replicas.check("load_weights()")
    with sockets.prepared.training_weights():
        _load(sockets.communicator, sockets.prepared, module, path)


def _load(communicator: Communicator, prepared: PreparedModules, module: nn.Module, path: str | Path) -> None:
    if module not in prepared:
        why = "load_weights needs a prepared model: call it after prepare()."
        if any(module is part for known in prepared for part in prepared.unwrap(known).modules()):
            why = (
                f"load_weights fills a whole model, and this {type(module).__name__} is a part of a prepared one: pass "
                "what prepare() returned. If a library such as PEFT wraps a model, its names change: load it before."
            )
        raise UsageError(why)
    plain = prepared.unwrap(module)
    files: WeightFiles | None = None

    def read() -> tuple[str, list[str], list[str], dict[str, Form]]:
        nonlocal files
        files = WeightFiles.at(path)
        return files.store.location, files.names, files.digests, files.forms()

    location, names, digests, forms = communicator.on_main(read)
    targets = _targets(plain, forms, path)
    if communicator.sharding.of_parameters:
        if files is None:
            files = _seen(location, names, digests)
        if all(communicator.all_gather_data(files is not None)):
            assert files is not None
            # Each reads its own part. What every rank needs whole is sent instead: a disk serves one reader faster.
            for name, target in targets.items():
                if communicator.sharding.is_sharded(target):
                    _copy_rows(communicator, target, files, name)
            targets = {name: target for name, target in targets.items() if not communicator.sharding.is_sharded(target)}
    sources = map(files.whole, targets) if files is not None else iter(())
    release = files.release if files is not None else lambda: None
    broadcast_tensors(communicator, list(targets.values()), sources, sent=release)


def _seen(location: str, names: list[str], digests: list[str]) -> WeightFiles | None:
    """Return the files that rank 0 has found, on another rank; None if it does not see the same."""
    try:
        files = WeightFiles(store_at(location), names)
        return files if files.digests == digests else None
    except CheckpointError:
        return None


@torch.no_grad()
def _copy_rows(communicator: Communicator, target: Tensor, files: WeightFiles, name: str) -> None:
    """Overwrite this rank's shard of a tensor, a piece at a time. Not collective."""
    shard, first = own_rows(communicator, target)
    if not shard.numel():
        return
    # A shard of another dtype than the file's is converted: in pieces, it is not twice in memory.
    step = max(1, files.piece_bytes * len(shard) // shard.nbytes)
    for start in range(0, len(shard), step):
        part = shard[start : start + step]
        part.copy_(files.rows(name, first + start, first + start + len(part)))
        files.release()


def _targets(module: nn.Module, saved: Mapping[str, Form], path: str | Path) -> dict[str, Tensor]:
    """Return the tensors to fill, by their names in the file. Raises CheckpointError if names or shapes differ."""
    state = {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    aliases: dict[int, list[str]] = {}  # of a weight that is tied, the file may have one name
    for name, tensor in state.items():
        aliases.setdefault(id(tensor), []).append(name)
    targets, wrong = {}, [f"{name} is not in the model" for name in saved if name not in state]
    for names in aliases.values():
        name = next((name for name in names if name in saved), names[0])
        tensor = state[name]
        if name not in saved:
            wrong.append(f"{name} is missing")
        elif tuple(tensor.shape) != saved[name].shape:
            wrong.append(f"{name} is {saved[name].shape}, but {tuple(tensor.shape)} in the model")
        else:
            targets[name] = tensor
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        remedy = "Pass the file of this model, or build the model that the file is of."
        prefix = next((prefix for prefix in _PREFIXES if saved and all(name.startswith(prefix) for name in saved)), "")
        if prefix and not any(name.startswith(prefix) for name in state):
            remedy = (
                f"Its names begin with {prefix!r}, as in a wrapped model: save the weights again without "
                f"it, as {{name.removeprefix({prefix!r}): tensor for name, tensor in weights.items()}}."
            )
        raise CheckpointError(
            f"{path} has weights of another model: {'; '.join(wrong[:3])}{more}. {remedy} Nothing was loaded."
        )
    return targets


class _Stored(NamedTuple):
    """A tensor in a file."""

    file: str
    dtype: torch.dtype
    shape: list[int]
    start: int  # the first of its bytes in the file
    end: int


class WeightFiles:
    """Files in a store, which are read when their tensors are. Each rank reads the rows that it needs."""

    def __init__(self, store: Store, names: Sequence[str]) -> None:
        self.store: Store = store
        self.names: list[str] = list(names)
        self.digests: list[str] = []  # of each file's size and beginning, which has its header
        self.piece_bytes: int = BUFFER_BYTES if isinstance(store, Disk) else _REQUEST  # to read of a tensor at a time
        self._mapped = MappedFiles()
        self._contents: dict[str, Tensor] = {}  # of files on a disk
        self._stored: dict[str, _Stored] = {}
        for name in names:
            self._read_header(name)

    @staticmethod
    def at(path: Path | str) -> WeightFiles:
        """Return the files of a model: the one at a path or URL, or in a folder there, or those that an index names.

        Raises CheckpointError if no file was found, or the index or a file is invalid.
        """
        place = parsed(path)
        is_file = not place.is_dir() if isinstance(place, Path) else place.rstrip("/").endswith((".safetensors", INDEX))
        store, name = file_at(path) if is_file else (store_at(path), "")
        if not name:
            with readable(str(store)), suppress(FileNotFoundError):
                names = store.list()
                name = next((default for default in ("model.safetensors", f"model{INDEX}") if default in names), "")
            if not name:
                raise CheckpointError(f"{store} has neither model.safetensors nor model{INDEX}: name the file.")
        if not name.endswith(INDEX):
            return WeightFiles(store, [name])
        with readable(store.shown(name)):
            text = store.get(name)
        try:
            names = sorted(set(json.loads(text)["weight_map"].values()))
            if any("/" in file for file in names):
                raise ValueError("it names a file in another folder")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            shown = store.shown(name)
            raise CheckpointError(f"{shown} is no index of safetensors: {type(error).__name__}: {error}") from error
        return WeightFiles(store, names)

    def forms(self) -> dict[str, Form]:
        """Return the forms of the tensors, by name."""
        return {
            name: Form(torch.empty(stored.shape, dtype=stored.dtype, device="meta"))
            for name, stored in self._stored.items()
        }

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Return some rows of a tensor. Raises CheckpointError."""
        whole = self._stored[name]
        row, shape = (whole.end - whole.start) // max(1, whole.shape[0]), [last - first, *whole.shape[1:]]
        return self._read(whole._replace(shape=shape, start=whole.start + first * row, end=whole.start + last * row))

    def whole(self, name: str) -> Tensor:
        """Return a tensor. Raises CheckpointError."""
        return self._read(self._stored[name])

    def release(self) -> None:
        """Release mapped pages."""
        self._mapped.release()

    def _read_header(self, file: str) -> None:
        shown = self.store.shown(file)
        with readable(shown):
            size = self.store.size(file)
        beginning = self._bytes(file, 0, min(size, _BEGINNING))
        self.digests.append(hashlib.sha256(f"{size} ".encode() + beginning).hexdigest())
        if beginning.startswith(_OF_TORCH):
            raise CheckpointError(
                f"{shown} is a file of torch.save, and not of safetensors. Load it into the model before prepare(): "
                "model.load_state_dict(strategy.load(path))."
            )
        try:
            end = 8 + int.from_bytes(beginning[:8], "little")
            if end > 8 + _LARGEST_HEADER:
                raise ValueError(f"its header would have {end - 8} bytes")
            header = json.loads((beginning + self._bytes(file, len(beginning), min(size, end)))[8:end])
            header.pop("__metadata__", None)
            for name, about in header.items():
                self._stored[name] = _stored(file, end, size, about)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            message = f"{shown} is no whole file of safetensors: {type(error).__name__}: {error}"
            raise CheckpointError(message) from error

    def _read(self, stored: _Stored) -> Tensor:
        file, dtype, shape, start, end = stored
        if isinstance(self.store, Disk):  # mapped, so that it is read when it is used
            if file not in self._contents:
                self._contents[file] = torch.empty(0, dtype=torch.uint8).set_(self._mapped.map(self.store.root / file))
            raw = self._contents[file][start:end]
        else:
            content = bytearray(self._bytes(file, start, end))
            raw = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        if raw.numel() != end - start:
            raise CheckpointError(f"{self.store.shown(file)} has changed or was cut while it was read.")
        return viewed(raw, dtype, shape)

    def _bytes(self, file: str, start: int, end: int) -> bytes:
        with readable(self.store.shown(file)):
            return self.store.get(file, start, end) if start < end else b""


def _stored(file: str, begin: int, size: int, about: Any) -> _Stored:
    """Return where a tensor is, given its entry in the header, where the header ends, and the size of the file."""
    dtype, shape = DTYPES[about["dtype"]], [int(length) for length in about["shape"]]
    start, end = (begin + int(offset) for offset in about["data_offsets"])
    if not (begin <= start <= end <= size and end - start == math.prod(shape) * dtype.itemsize):
        raise ValueError(f"{about} does not fit into {size} bytes")
    return _Stored(file, dtype, shape, start, end)
