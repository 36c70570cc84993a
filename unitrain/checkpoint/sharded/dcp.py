"""The format of torch.distributed.checkpoint (DCP): files of pieces of tensors, and metadata that say where each is.

torch's planner says which pieces a rank reads. The metadata are a pickle, which torch itself would load whatever it
calls. Here it can only name what metadata consist of. torch's classes are imported when metadata are made or loaded,
since their package takes 0.3 s to import.
"""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from unitrain.checkpoint.store.located import Located, intact, verified
from unitrain.checkpoint.store.torch_files import reason, save_without_crc
from unitrain.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

METADATA = ".metadata"  # the name of the file with the metadata
PIECE_BYTES = 2**25  # larger tensors are written in pieces, as torch reads a piece into memory as a whole
Keys = tuple[Any, ...]
"""The path of a value: the name of an object, and the keys and positions that lead to the value in its state."""


class Piece(NamedTuple):
    """Rows of a tensor, or a plain value, in a file. As JSON has it, it is a list."""

    path: Keys  # where the tensor or the value is in the states
    dtype: str | None  # ``float32``; None for a plain value
    shape: tuple[int, ...] = ()  # of the tensor
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    file: str = ""
    start: int = 0
    length: int = 0


# -------------------------------------------------------------------------------------------------------- metadata


def key_of(path: Keys) -> str:
    """Return the key of a value in metadata, given its path."""
    return ".".join(map(str, path))


def to_bytes(pieces: Iterable[Piece]) -> bytes:
    """Return the content of a metadata file, given the pieces in all ranks' files.

    Raises CheckpointError unless they are complete.
    """
    from torch.distributed.checkpoint import metadata as classes
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    forms, paths, storage = dict[str, Any](), dict[str, Keys](), dict[Any, Any]()
    for path, dtype, shape, offsets, sizes, file, start, length in pieces:
        key, offset = key_of(path), None
        paths[key] = tuple(path)
        if dtype is None:
            forms[key] = classes.BytesStorageMetadata()
        else:
            if key not in forms:
                properties = classes.TensorProperties(getattr(torch, dtype))
                forms[key] = classes.TensorStorageMetadata(properties, torch.Size(shape), [])
            offset = torch.Size(offsets)
            forms[key].chunks.append(classes.ChunkStorageMetadata(offset, torch.Size(sizes)))
        storage[classes.MetadataIndex(key, offset)] = _StorageInfo(file, start, length)
    for key, form in forms.items():
        if isinstance(form, classes.TensorStorageMetadata):
            written, expected = sum(prod(chunk.sizes) for chunk in form.chunks), prod(form.size)
            if written != expected:
                raise CheckpointError(f"the ranks have written {written} elements of {key}, which has {expected}")
    return pickle.dumps(classes.Metadata(forms, paths, storage, classes.StorageMeta(), version="1.0.0"))


def from_bytes(content: bytes, shown: str) -> Metadata:
    """Parse a metadata file without running code in it. ``shown`` is its path or URL.

    Raises CheckpointError if it is no metadata.
    """
    collects = gc.isenabled()
    gc.disable()  # it would look at all these objects again and again, and take most of the time
    try:
        metadata: Metadata = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # pickle raises many kinds of exceptions for a broken file
        raise CheckpointError(f"{shown} could not be read: {reason(error)}") from error
    finally:
        if collects:
            gc.enable()
    return metadata


_MODULE = "torch.distributed.checkpoint.metadata"
# Plain classes of torch.
_ALLOWED = {
    (_MODULE, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        from torch.distributed.checkpoint import metadata

        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED or (module == _MODULE and name in metadata.__all__):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


# ------------------------------------------------------------------------------------------------- writing pieces


def write(output: BinaryIO, value: Any, part: Piece) -> Iterator[Piece]:
    """Write a plain value, or rows of a tensor on the CPU, to a file, and yield the pieces, given them as one."""
    for first, content in [(0, value)] if part.dtype is None else _pieces(value):
        start = output.tell()
        save_without_crc(content, output)
        offsets = tuple(first + offset if dim == 0 else offset for dim, offset in enumerate(part.offsets))
        sizes = () if part.dtype is None else tuple(content.shape)
        yield part._replace(offsets=offsets, sizes=sizes, start=start, length=output.tell() - start)


def _pieces(value: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield consecutive rows of a tensor, with the number of the first."""
    count = len(value) if value.dim() else 1
    rows = max(1, PIECE_BYTES * count // max(1, value.nbytes))
    for first in range(0, max(1, count), rows):
        piece = (value[first : first + rows] if value.dim() else value).contiguous()
        if piece.untyped_storage().nbytes() != piece.nbytes:  # all of which would be written
            piece = piece.clone()
        yield first, piece


# ------------------------------------------------------------------------------------------------- reading pieces


class Stored:
    """The tensors and plain values that several ranks have written, of which a rank reads the parts that it needs.

    ``content`` are the metadata. Raises CheckpointError if they are invalid.
    """

    def __init__(self, located: Located, content: bytes) -> None:
        shown = located.store.shown(located.file_name(METADATA))
        self.metadata: Metadata = from_bytes(content, shown)
        self.digest: str = xxh3_128_hexdigest(content)
        self._located = located
        self._open = ExitStack()
        self._paths: dict[str, Path] = {}  # of the files that were fetched

    def fetch(self, names: Iterable[str]) -> None:
        """Verify files that were not fetched before, and download them from an object store. Raises as ``verified``."""
        for name in sorted(set(names) - self._paths.keys()):
            self._paths[name] = self._open.enter_context(verified(self._located, name))

    def close(self) -> None:
        """Remove downloaded files."""
        self._open.close()
        self._paths.clear()

    @torch.no_grad()
    def read(self, tensors: dict[str, Tensor]) -> None:
        """Overwrite tensors, by key: of a sharded tensor, this rank's shard."""
        from torch.distributed.checkpoint import DefaultLoadPlanner

        planner = DefaultLoadPlanner(flatten_state_dict=False)
        with intact("a file of the checkpoint"):
            planner.set_up_planner(tensors, self.metadata)
            for item in planner.create_local_plan().items:
                ends = map(sum, zip(item.storage_offsets, item.lengths, strict=True))
                part = self._loaded(item.storage_index)[tuple(map(slice, item.storage_offsets, ends))]
                planner.resolve_tensor(item).copy_(part)

    def _loaded(self, index: MetadataIndex) -> Any:
        """Return the tensor or the plain value of a piece. Raises any exception of ``torch.load``."""
        info = self.metadata.storage_data[index]
        self.fetch([info.relative_path])
        with open(self._paths[info.relative_path], "rb") as file:
            file.seek(info.offset)
            content = io.BytesIO(file.read(info.length))  # torch reads it slowly from a file
        return torch.load(content, map_location="cpu", weights_only=True)

    def empty(self, key: str, device: str = "cpu") -> Tensor:
        """Return an uninitialised tensor of the shape and dtype of a stored one."""
        form: Any = self.metadata.state_dict_metadata[key]
        return torch.empty(form.size, dtype=form.properties.dtype, device=device)

    def whole(self, key: str) -> Tensor:
        """Return a tensor on the CPU. Raises the errors of ``read``."""
        tensor = self.empty(key)
        self.read({key: tensor})
        return tensor

    def value(self, key: str) -> Any:
        """Return a plain value. Raises the errors of ``read``."""
        from torch.distributed.checkpoint.metadata import MetadataIndex

        with intact("a file of the checkpoint"):
            return self._loaded(MetadataIndex(key))
