"""``load_weights`` and ``save_weights``: a model's weights from and to files of safetensors, as Hugging Face has them.

Rank 0 reads and writes the files: a tensor at a time, or the tensors of one file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

import unitrain
from unitrain.checkpoint.sharded.saving import gathered
from unitrain.communication.state_transfer import broadcast_tensors, in_chunks
from unitrain.errors import CheckpointError, UsageError, writing
from unitrain.training.models.batch_norm import average_statistics
from unitrain.training.models.prepared import Average
from unitrain.url import is_url

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_FILE_BYTES = 5 * 10**9  # of tensors in a file, as Hugging Face divides models
_WRAPPED = ("module.", "_orig_mod.")  # the prefixes of DDP and DataParallel, and of torch.compile


def load_weights(strategy: unitrain.Strategy, module: nn.Module, path: str | Path) -> None:
    """Fill a prepared model with the weights in files of safetensors, which rank 0 reads. Collective.

    Of a sharded model, each rank gets its own part, and none holds the model. Values are converted to the dtypes of the
    model. It needs the package safetensors.

    Args:
        strategy: the strategy of the run.
        module: the model, as ``prepare`` returned it. It may have been built on the meta device.
        path: a file such as ``model.safetensors``, an index of several as Hugging Face writes them
            (``model.safetensors.index.json``), or a folder with one of these.

    Raises:
        CheckpointError: a file can't be read, or names or shapes are not the model's; on every rank.
        UsageError: the model is not prepared.

    Example:
        >>> with torch.device("meta"):
        ...     model = Transformer(config)
        >>> model = strategy.prepare(model)
        >>> load_weights(strategy, model, "models/llama")
    """
    sockets, prepared = strategy._sockets, strategy._sockets.prepared
    sockets.replicas.check("load_weights()")
    if module not in prepared:
        raise UsageError("load_weights fills a whole prepared model: pass what prepare() returned.")
    plain = prepared.unwrap(module)
    files: dict[str, Any] = {}

    def read() -> dict[str, list[int]]:
        files.update(_opened(Path(path)))
        return {name: file.get_slice(name).get_shape() for name, file in files.items()}

    with prepared.training_weights():
        targets = _targets(plain, sockets.communicator.on_main(read), path)
        sources = (files[name].get_tensor(name) for name in targets)
        broadcast_tensors(sockets.communicator, list(targets.values()), sources)


def _opened(path: Path) -> dict[str, Any]:
    """Return the open file of each tensor, by the tensor's name. Raises CheckpointError."""
    from safetensors import SafetensorError, safe_open

    if path.is_dir():
        path /= WHOLE if (path / WHOLE).exists() else INDEX
    names = [path.name]
    try:
        if path.name.endswith(".json"):
            names = sorted(set(json.loads(path.read_bytes())["weight_map"].values()))
        files: list[Any] = [safe_open(path.parent / name, framework="pt") for name in names]
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        raise CheckpointError(
            f"weights can't be read from {path}: {type(error).__name__}: {error}. Pass a file of safetensors, an index "
            f"of several ({INDEX}), or a folder with one of these. What torch.save has written is loaded before "
            "prepare(): model.load_state_dict(strategy.load(path))."
        ) from error
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118


def _targets(module: nn.Module, saved: Mapping[str, list[int]], path: str | Path) -> dict[str, Tensor]:
    """Return the tensors to fill, by their names in the file. Raises CheckpointError if names or shapes differ."""
    state = {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    wrong = [f"{name} is not in the model" for name in saved if name not in state]
    targets = {name: tensor for name, tensor in state.items() if name in saved}
    filled = {id(tensor) for tensor in targets.values()}  # of a tied weight, the file may have one name
    for name, tensor in state.items():
        if id(tensor) not in filled:
            wrong.append(f"{name} is missing")
        elif name in saved and list(tensor.shape) != saved[name]:
            wrong.append(f"{name} is {saved[name]}, but {list(tensor.shape)} in the model")
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        remedy = "Pass the file of this model, or build the model that the file is of."
        if any(name.startswith(_WRAPPED) for name in saved):
            remedy = f"Names with {' or '.join(_WRAPPED)} are a wrapped model's: save its weights without that prefix."
        raise CheckpointError(
            f"{path} has weights of another model: {'; '.join(wrong[:3])}{more}. {remedy} Nothing was loaded."
        )
    return targets


def save_weights(strategy: unitrain.Strategy, module: nn.Module, folder: str | Path) -> None:
    """Save a model's weights as safetensors, in files of at most 5 GB, with an index if they are several. Collective.

    With a ``config.json``, transformers' ``from_pretrained`` reads the folder, and so does ``load_weights``. Rank 0
    writes the files, and holds the tensors of one in host memory; no other rank has more than one whole tensor of a
    sharded model. Running statistics of BatchNorm layers that are not synchronised are averaged over the ranks first.
    Of an average, such as an EMA, the averaged weights are saved. It needs the package safetensors.

    An earlier model in the folder is replaced. If that is interrupted, the folder has no model that can be read.

    Args:
        strategy: the strategy of the run.
        module: the model, as ``prepare`` returned it, or an average of it.
        folder: a path.

    Raises:
        CheckpointError: a file could not be written; on every rank.
        UsageError: the folder is a URL.

    Example:
        >>> save_weights(strategy, model, "models/llama-tuned")
    """
    if is_url(folder):
        raise UsageError(f"{folder} is a URL, but save_weights writes to a folder: pass a path.")
    sockets, communicator = strategy._sockets, strategy._sockets.communicator
    sockets.replicas.check("save_weights()")
    swapped = module.swapped() if isinstance(module, Average) else nullcontext(module)
    with swapped as model:
        average_statistics([model], communicator, sockets.prepared.shares)
        state = _tensors(sockets.prepared.unwrap(model))
        groups = list(in_chunks(state, lambda name: state[name].nbytes, _FILE_BYTES))
        files = [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
        if len(files) == 1:
            files = [WHOLE]
        communicator.on_main(partial(_begin, Path(folder), state, dict(zip(files, groups, strict=True))))
        for file, names in zip(files, groups, strict=True):
            tensors = gathered(communicator, {name: state[name] for name in names})
            communicator.on_main(partial(_write, Path(folder, file), tensors))


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors to save, by name. A tied weight has its first name only, as Hugging Face expects."""
    first: dict[int, str] = {}
    state = module.state_dict(keep_vars=True)
    return {name: tensor.detach() for name, tensor in state.items() if first.setdefault(id(tensor), name) == name}


def _begin(folder: Path, state: Mapping[str, Tensor], files: Mapping[str, list[str]]) -> None:
    """Make the folder, remove an earlier model from it, and write the index, if there will be several files."""
    with writing(folder, CheckpointError):
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if _FILE.fullmatch(path.name):
                path.unlink()
        if len(files) > 1:
            total = sum(tensor.nbytes for tensor in state.values())
            file_of = {name: file for file, names in files.items() for name in names}
            index = {"metadata": {"total_size": total}, "weight_map": file_of}
            (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file. Raises CheckpointError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # Copies, since safetensors refuses tensors that share memory.
    copies = {
        name: tensor.to("cpu", copy=True, memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    try:
        save_file(copies, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"{path} can't be written: {error}. Correct that, or use another folder.") from error


def write_tensors(file: BinaryIO, names: Iterable[str], tensors: Iterable[Tensor]) -> None:
    """Write tensors to a file, for ``unitrain checkpoint merge``. All are in memory at once.

    Args:
        file: the file, which is empty.
        names: the name of each tensor.
        tensors: the tensors in this order.
    """
    _write(Path(file.name), dict(zip(names, tensors, strict=True)))
