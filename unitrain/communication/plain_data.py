"""Plain data as JSON and tensors, which is how ranks send it to one another: to decode it runs no code.

Plain are None, bools, ints, floats, complex numbers, strings, bytes, dense tensors, torch.Size, torch.device,
torch.dtype, and lists, tuples, dicts and OrderedDicts of these; no subclasses of them, and no object that contains
itself.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
        torch.int64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32,
        torch.float64, torch.complex64, torch.complex128,
    )
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_CHUNK_BYTES = 2**26
# By the name of a class: the class, and functions to and from plain data.
_registered: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {}


class NotPlainError(TypeError):
    """A value is not plain data."""


def register(kind: type[T], to_plain: Callable[[T], Any], from_plain: Callable[[Any], T]) -> None:
    """Have instances of a class of the core sent as plain data.

    ``from_plain`` must do no harm whatever it is given.
    """
    _registered[kind.__name__] = (kind, to_plain, from_plain)


def encode(value: Any) -> tuple[bytes, list[Tensor]]:
    """Return plain data as JSON, and its tensors on the CPU, in the order of ``decode``.

    NotPlainError is raised if the value is not plain data.
    """
    tensors: list[Tensor] = []
    try:
        return json.dumps(_encoded(value, tensors, set()), separators=(",", ":")).encode(), tensors
    except (ValueError, RecursionError) as error:  # an int of thousands of digits; nested too deeply
        raise NotPlainError(str(error)) from error


def decode(data: bytes) -> tuple[Any, list[Tensor]]:
    """Return the value that was encoded as ``data``, and its tensors, which are to be filled in.

    ValueError is raised if ``encode`` returns no such data.
    """
    tensors: list[Tensor] = []
    try:
        return _decoded(json.loads(data), tensors), tensors
    except (ValueError, TypeError, LookupError, OverflowError, RuntimeError) as error:  # recursion, memory
        raise ValueError(f"{type(error).__name__}: {error}") from error


def chunks(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Split tensors into lists of flat views of their bytes, each of at most 64 MiB, for one transfer each."""
    chunk: list[Tensor] = []
    size = 0
    for tensor in tensors:
        for part in torch.split(tensor.reshape(-1).view(torch.uint8), _CHUNK_BYTES):
            if chunk and size + part.numel() > _CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
            chunk.append(part)
            size += part.numel()
    if size:
        yield chunk


def _encoded(value: Any, tensors: list[Tensor], containing: set[int]) -> Any:
    """Return what JSON stands for a value: itself, or a dict with one key that names its type."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is Tensor:
        return {"tensor": _encoded_tensor(value, tensors)}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is torch.device:
        return {"device": str(value)}
    if kind is torch.dtype and value in _NAMES:
        return {"dtype": _NAMES[value]}
    if _registered.get(kind.__name__, (None,))[0] is kind:
        return {kind.__name__: _encoded(_registered[kind.__name__][1](value), tensors, containing)}
    if kind not in (list, tuple, torch.Size, dict, OrderedDict) or id(value) in containing:
        raise NotPlainError(f"{kind.__module__}.{kind.__qualname__} is not plain data")
    within = containing | {id(value)}
    if kind is list:
        return [_encoded(item, tensors, within) for item in value]
    if kind in (tuple, torch.Size):
        return {kind.__name__: [_encoded(item, tensors, within) for item in value]}
    items = [[_encoded(key, tensors, within), _encoded(item, tensors, within)] for key, item in value.items()]
    # What torch's state dicts say of the versions of modules.
    if kind is OrderedDict and vars(value):
        if set(vars(value)) != {"_metadata"}:
            raise NotPlainError("an OrderedDict with attributes is not plain data")
        return {"OrderedDict": [items, _encoded(value._metadata, tensors, within)]}
    return {kind.__name__: [items]}


def _encoded_tensor(value: Tensor, tensors: list[Tensor]) -> list[Any]:
    if value.layout != torch.strided or value.dtype not in _NAMES or value.requires_grad or value.is_meta:
        raise NotPlainError(f"a {value.dtype} tensor of layout {value.layout} is not plain data")
    tensors.append(value.cpu().resolve_conj().resolve_neg().contiguous())
    return [_NAMES[value.dtype], list(value.shape)]


def _decoded(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    match kind:
        case "tensor":
            name, shape = content
            tensors.append(torch.empty(shape, dtype=_DTYPES[name]))
            return tensors[-1]
        case "complex":
            return complex(*content)
        case "bytes":
            return bytes.fromhex(content)
        case "tuple":
            return tuple(_decoded(item, tensors) for item in content)
        case "device":
            return torch.device(content)
        case "dtype":
            return _DTYPES[content]
        case "Size":
            return torch.Size(content)
        case "dict":
            return dict(_items(content[0], tensors))
        case "OrderedDict":
            ordered = OrderedDict(_items(content[0], tensors))
            if len(content) > 1:
                vars(ordered)["_metadata"] = _decoded(content[1], tensors)
            return ordered
    if kind in _registered:
        return _registered[kind][2](_decoded(content, tensors))
    raise ValueError(f"unknown kind {kind!r}")


def _items(content: Any, tensors: list[Tensor]) -> list[tuple[Any, Any]]:
    return [(_decoded(key, tensors), _decoded(item, tensors)) for key, item in content]
