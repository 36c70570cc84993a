"""The format of torch.distributed.checkpoint (DCP): files of pieces of tensors, and metadata that say where each is.

A piece is an archive of ``torch.save``. The metadata are a pickle, which torch itself would load whatever it calls.
Here it can only name what metadata consist of. torch's classes are imported when metadata are made or loaded, since
their package takes 0.3 s to import.
"""

from __future__ import annotations

import gc
import io
import pickle
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache
from math import prod
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from unitrain.checkpoint.names import Keys
from unitrain.checkpoint.store.located import DamagedError, Located, unreadable, verified
from unitrain.checkpoint.store.torch_files import MappedFiles, reason, save_without_crc, viewed
from unitrain.errors import CheckpointError

METADATA = ".metadata"  # the name of the file with the metadata
PIECE_BYTES = 2**25  # larger tensors are written in pieces, as torch reads a piece into memory as a whole
_ALIGNMENT = 64  # torch aligns the elements in an archive so: aligned archives can be read in place
_RELEASED_BYTES = 2**26  # the memory of mapped files is released whenever so much was read


class Region(NamedTuple):
    """A part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def rows(cls, first: int, local: Tensor) -> Region:
        """Return the region of rows of a tensor, from a first one."""
        return cls((first, *[0] * local.dim())[: local.dim()], tuple(local.shape))


class Piece(NamedTuple):
    """A part of a tensor, or a plain value, in a file."""

    region: Region
    file: str
    start: int
    length: int


class Entry(NamedTuple):
    """A tensor or a plain value of a checkpoint."""

    path: Keys  # where it is in the states
    dtype: str | None  # ``float32``; None for a plain value
    shape: tuple[int, ...]
    pieces: list[Piece]

    def new(self, device: str = "cpu") -> Tensor:
        """Return an uninitialised tensor of this shape and dtype."""
        return torch.empty(self.shape, dtype=getattr(torch, str(self.dtype)), device=device)


Layout = dict[str, Entry]  # the entries of a checkpoint by key


# -------------------------------------------------------------------------------------------------------- metadata


def merged(layouts: Iterable[Layout]) -> Layout:
    """Join the layouts of all ranks' files. Raises CheckpointError unless the result is complete."""
    whole: Layout = {}
    for layout in layouts:
        for key, entry in layout.items():
            if key not in whole:
                whole[key] = entry._replace(pieces=[*entry.pieces])
            elif entry.dtype is None:
                raise CheckpointError(f"two ranks have written {key}")
            else:
                whole[key].pieces.extend(entry.pieces)
    for key, entry in whole.items():
        written, expected = sum(prod(piece.region.sizes) for piece in entry.pieces), prod(entry.shape)
        if written != expected:
            raise CheckpointError(f"the ranks have written {written} elements of {key}, which has {expected}")
    return whole


def to_bytes(layout: Layout) -> bytes:
    """Return the content of a metadata file."""
    from torch.distributed.checkpoint import metadata as classes
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    paths = {key: entry.path for key, entry in layout.items()}
    metadata = classes.Metadata({}, paths, {}, classes.StorageMeta(), version="1.0.0")
    plain, info = classes.BytesStorageMetadata(), cache(_StorageInfo)  # one for all entries that share it
    for key, entry in layout.items():
        chunks = []
        for (offsets, sizes), file, start, length in entry.pieces:
            chunk = classes.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            chunks.append(chunk)
            index = classes.MetadataIndex(key, None if entry.dtype is None else chunk.offsets)
            metadata.storage_data[index] = info(file, start, length)
        if entry.dtype is None:
            metadata.state_dict_metadata[key] = plain
        else:
            properties, shape = classes.TensorProperties(getattr(torch, entry.dtype)), torch.Size(entry.shape)
            metadata.state_dict_metadata[key] = classes.TensorStorageMetadata(properties, shape, chunks)
    return pickle.dumps(metadata)


def from_bytes(content: bytes, shown: str) -> Layout:
    """Parse a metadata file without running code in it. ``shown`` is its path or URL.

    Raises CheckpointError if it is no metadata, or names files outside of the checkpoint's folder.
    """
    collects = gc.isenabled()
    gc.disable()  # it would look at all these objects again and again, and take most of the time
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
        layout: Layout = {}
        sizes: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
        for key, value in metadata.state_dict_metadata.items():
            path = tuple((metadata.planner_data or {}).get(key, (key,)))
            if hasattr(value, "chunks"):
                dtype = str(value.properties.dtype).removeprefix("torch.")
                layout[key] = Entry(path, dtype, tuple(value.size), [])
                sizes.update(((key, tuple(chunk.offsets)), tuple(chunk.sizes)) for chunk in value.chunks)
            else:
                layout[key] = Entry(path, None, (), [])
        for index, info in metadata.storage_data.items():
            file, offsets = str(info.relative_path), tuple(index.offset or ())
            if "/" in file or file in ("", ".", ".."):
                raise ValueError(f"it names {file}, which is not in the folder of the checkpoint")
            region = Region(offsets, sizes.get((index.fqn, offsets), ()))
            layout[index.fqn].pieces.append(Piece(region, file, info.offset, info.length))
    except Exception as error:  # pickle raises many kinds of exceptions for a broken file
        raise CheckpointError(f"{shown} could not be read: {reason(error)}") from error
    finally:
        if collects:
            gc.enable()
    return layout


_MODULE = "torch.distributed.checkpoint.metadata"
# Plain classes of torch, dtypes, sizes, and paths.
_ALLOWED = {
    (_MODULE, "BytesStorageMetadata"),
    (_MODULE, "ChunkStorageMetadata"),
    (_MODULE, "Metadata"),
    (_MODULE, "MetadataIndex"),
    (_MODULE, "StorageMeta"),
    (_MODULE, "TensorProperties"),
    (_MODULE, "TensorStorageMetadata"),
    (_MODULE, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


# ------------------------------------------------------------------------------------------------- writing pieces


def write(output: BinaryIO, file: str, value: Any, first: int | None) -> Iterator[Piece]:
    """Write rows of a tensor on the CPU to a file, and yield the pieces. ``first`` is None for a plain value."""
    for region, content in _pieces(value, first):
        output.write(bytes(-output.tell() % _ALIGNMENT))
        start = output.tell()
        save_without_crc(content, output)
        yield Piece(region, file, start, output.tell() - start)


def _pieces(value: Any, first: int | None) -> Iterator[tuple[Region, Any]]:
    if first is None:
        yield Region((), ()), value
        return
    count = len(value) if value.dim() else 1
    rows = max(1, PIECE_BYTES * count // max(1, value.nbytes))
    for start in range(0, max(1, count), rows):
        piece = (value[start : start + rows] if value.dim() else value).contiguous()
        if piece.untyped_storage().nbytes() != piece.nbytes:  # all of which would be written
            piece = piece.clone()
        yield Region.rows(first + start, piece), piece


# ------------------------------------------------------------------------------------------------- reading pieces


class Stored:
    """The tensors and plain values that several ranks have written, of which a rank reads the parts that it needs.

    ``content`` are the metadata. Raises CheckpointError if they are invalid.
    """

    def __init__(self, located: Located, content: bytes) -> None:
        shown = located.store.shown(located.file_name(METADATA))
        self.layout: Layout = from_bytes(content, shown)  # where the pieces are
        self.digest: str = xxh3_128_hexdigest(content)
        self._located = located
        self._open = ExitStack()
        self._mapped = MappedFiles()
        self._contents: dict[str, Tensor] = {}
        self._forms: dict[tuple[Any, ...], _Form] = {}
        self._unreleased = 0

    def fetch(self, names: Iterable[str]) -> None:
        """Verify files that were not fetched before, and download them from an object store. Raises as ``verified``."""
        located = self._located
        for name in sorted(set(names) - self._contents.keys()):
            store, file = located.store, located.file_name(name)
            if not located.manifest.files:  # another tool has written them, without a manifest
                path = self._open.enter_context(store.file(file))
            elif name not in located.manifest.files:
                raise DamagedError(f"{store.shown(file)} is not in the manifest")
            else:
                path = self._open.enter_context(verified(located, name))
            self._contents[name] = torch.empty(0, dtype=torch.uint8).set_(self._mapped.map(path))

    def check(self, names: Iterable[str]) -> None:
        """Fetch files, and check each piece in them against the metadata. Raises the errors of ``read``."""
        wanted = set(names)
        self.fetch(wanted)
        for entry in self.layout.values():
            for piece in entry.pieces:
                if piece.file in wanted:
                    self._loaded(entry, piece)

    def close(self) -> None:
        """Remove downloaded files."""
        self._open.close()
        self._contents.clear()

    @torch.no_grad()
    def read(self, tensors: Mapping[str, tuple[Tensor, Region]]) -> None:
        """Overwrite tensors with regions, by key."""
        for key, (target, region) in tensors.items():
            entry, copied = self.layout[key], 0
            for piece in entry.pieces:
                common = _overlap(region, piece.region)
                if common is not None:
                    source = _part(self._loaded(entry, piece), piece.region, common)
                    copied += _part(target, region, common).copy_(source).numel()
            if copied != target.numel():
                raise CheckpointError(f"a part of {key} is in no file of the checkpoint")

    def whole(self, key: str) -> Tensor:
        """Return a tensor on the CPU. Raises the errors of ``read``."""
        tensor = self.layout[key].new()
        self.read({key: (tensor, Region.rows(0, tensor))})
        return tensor

    def value(self, key: str) -> Any:
        """Return a plain value. Raises the errors of ``read``."""
        entry = self.layout[key]
        if not entry.pieces:
            raise CheckpointError(f"{key} is in no file of the checkpoint")
        return self._loaded(entry, entry.pieces[0])

    def _loaded(self, entry: Entry, piece: Piece) -> Any:
        """Return the value of a piece: a tensor in place, or a plain value."""
        try:
            self.fetch([piece.file])
            content = self._contents[piece.file][piece.start : piece.start + piece.length]
            self._unreleased += piece.length
            if self._unreleased > _RELEASED_BYTES:
                self._mapped.release()
                self._unreleased = 0
            kind = entry.dtype, piece.region.sizes
            form = self._forms.get(kind)
            if form is not None and (tensor := form.tensor_in(content)) is not None:
                return tensor
            value = torch.load(io.BytesIO(content.numpy().data), map_location="cpu", weights_only=True)
            if entry.dtype is not None and _described(value) != kind:
                wanted, actual = (f"{dtype} {tuple(shape)}" for dtype, shape in (kind, _described(value)))
                raise DamagedError(f"{piece.file} has {actual} where the metadata say {wanted}")
            # The next tensor of this kind is used in place: torch.load copies it twice.
            form = None if entry.dtype is None else _Form.of(content, value)
            if form is not None:
                self._forms[kind] = form
            return value
        except (DamagedError, CheckpointError):
            raise
        except Exception as error:  # torch.load raises many kinds of exceptions for a broken file
            raise unreadable("a file of the checkpoint", error) from error


def _described(value: Any) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and the shape of a tensor, or the class of another object."""
    is_tensor = isinstance(value, Tensor)
    return (str(value.dtype).removeprefix("torch."), tuple(value.shape)) if is_tensor else (type(value).__name__, ())


class _Form(NamedTuple):
    """The header that torch.save writes before every tensor of one shape, dtype and memory format."""

    head: bytes  # all that is before the elements. The rest depends on them
    like: Tensor  # a tensor on the meta device

    @classmethod
    def of(cls, content: Tensor, tensor: Tensor) -> _Form | None:
        """Return the form of an archive, given the tensor in it; None if that is not dense and in order."""
        is_plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_quantized
        if not is_plain or not tensor.is_contiguous() or tensor.storage_offset() or tensor.is_conj() or tensor.is_neg():
            return None
        archive = content.numpy().data
        records = [record for record in zipfile.ZipFile(io.BytesIO(archive)).infolist() if "/data/" in record.filename]
        if len(records) != 1 or records[0].compress_type != zipfile.ZIP_STORED:
            return None
        header = records[0].header_offset
        start = header + 30 + sum(struct.unpack_from("<2H", archive, header + 26))  # the name and what is added to it
        return cls(bytes(archive[:start]), tensor.to("meta"))

    def tensor_in(self, content: Tensor) -> Tensor | None:
        """Return the tensor in an archive, in place; None if the archive has another form."""
        start = len(self.head)
        if bytes(content[:start].numpy().data) != self.head:
            return None
        return viewed(content[start : start + self.like.nbytes], self.like.dtype, self.like.shape)


def _overlap(left: Region, right: Region) -> Region | None:
    """Return the region that two regions of a tensor have in common, if they have elements in common."""
    offsets = tuple(map(max, left.offsets, right.offsets))
    ends = [min(a + n, b + m) for a, n, b, m in zip(*left, *right, strict=True)]
    sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
    return Region(offsets, sizes) if all(size > 0 for size in sizes) else None


def _part(tensor: Tensor, region: Region, part: Region) -> Tensor:
    """Return a part of a tensor, which has a region of a larger one."""
    for dim, (offset, begin, size) in enumerate(zip(part.offsets, region.offsets, part.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset - begin, size)
    return tensor
