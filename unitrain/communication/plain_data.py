"""Plain data as JSON and tensors, which is how ranks send it to one another: to decode it runs no code.

Plain are None, bools, ints, floats, complex numbers, strings, bytes, dense tensors, torch.Size, torch.device,
torch.dtype, and lists, tuples, dicts and OrderedDicts of these that don't contain themselves; no subclasses of them.
"""

from __future__ import annotations

import json
import math
import struct
from collections import OrderedDict
from collections.abc import Callable
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
_LENGTH = struct.Struct("!Q")
# By the name of a class: the class, and functions to and from plain data.
_registered: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {}


class NotPlainError(TypeError):
    """A value is not plain data."""


def register(kind: type[T], to_plain: Callable[[T], Any], from_plain: Callable[[Any], T]) -> None:
    """Have instances of a class of the core sent as plain data.

    ``from_plain`` must do no harm whatever it is given.
    """
    _registered[kind.__name__] = (kind, to_plain, from_plain)


def encode(value: Any) -> Tensor:
    """Return plain data as bytes on the CPU: the length of JSON, the JSON, and the content of its tensors.

    NotPlainError is raised if the value is not plain data.
    """
    tensors: list[Tensor] = []
    try:
        header = json.dumps(_encoded(value, tensors, set()), separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:  # an int of thousands of digits; nested too deeply
        raise NotPlainError(str(error)) from error
    start = torch.frombuffer(bytearray(_LENGTH.pack(len(header)) + header), dtype=torch.uint8)
    return torch.cat([start, *(tensor.reshape(-1).view(torch.uint8) for tensor in tensors)])


def decode(data: Tensor) -> Any:
    """Return the value that was encoded as ``data``. ValueError is raised if ``encode`` returns no such data."""
    try:
        [length] = _LENGTH.unpack(data[: _LENGTH.size].numpy().tobytes())
        header, content = data[_LENGTH.size :][:length], _Content(data[_LENGTH.size + length :])
        if header.numel() != length:
            raise ValueError(f"it has {header.numel()} bytes instead of {length}")
        value = _decoded(json.loads(header.numpy().tobytes()), content)
    except (ValueError, TypeError, LookupError, OverflowError, RuntimeError, struct.error) as error:  # recursion, too
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if content.left.numel():
        raise ValueError(f"{content.left.numel()} bytes too many")
    return value


class _Content:
    """The rest of the content of tensors."""

    def __init__(self, left: Tensor) -> None:
        self.left = left

    def take(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        taken, self.left = self.left[:size].clone(), self.left[size:]
        if taken.numel() != size:
            raise ValueError(f"a tensor has {taken.numel()} bytes instead of {size}")
        return taken.view(dtype).view(shape)


def _encoded(value: Any, tensors: list[Tensor], containing: set[int]) -> Any:
    """Return the JSON of a value: itself, or a dict with one key that names its type."""
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


def _decoded(value: Any, content: _Content) -> Any:
    if isinstance(value, list):
        return [_decoded(item, content) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, its)] = value.items()
    match kind:
        case "tensor":
            return content.take(_DTYPES[its[0]], its[1])
        case "complex":
            return complex(*its)
        case "bytes":
            return bytes.fromhex(its)
        case "tuple":
            return tuple(_decoded(item, content) for item in its)
        case "device":
            return torch.device(its)
        case "dtype":
            return _DTYPES[its]
        case "Size":
            return torch.Size(its)
        case "dict":
            return dict(_items(its[0], content))
        case "OrderedDict":
            ordered = OrderedDict(_items(its[0], content))
            if len(its) > 1:
                vars(ordered)["_metadata"] = _decoded(its[1], content)
            return ordered
    if kind in _registered:
        return _registered[kind][2](_decoded(its, content))
    raise ValueError(f"unknown kind {kind!r}")


def _items(items: Any, content: _Content) -> list[tuple[Any, Any]]:
    return [(_decoded(key, content), _decoded(item, content)) for key, item in items]
