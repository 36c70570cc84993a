"""Plain data as JSON and tensors, which is how ranks send it to one another: to decode it runs no code.

torch.load with ``weights_only=True`` is no substitute: before torch 2.10, a stranger's data could run code there
(CVE-2026-24747). And it builds the classes that any library of the process has declared safe.

Plain are None, bools, ints, floats, complex numbers, strings, bytes, dense tensors, torch.Size, torch.device,
torch.dtype, and lists, tuples, dicts, Counters and OrderedDicts of these that don't contain themselves; no subclasses
of them.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict
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
_LENGTH = struct.Struct("!Q")


class NotPlainError(TypeError):
    """A value is not plain data."""


def register(kind: type[T], to_plain: Callable[[T], Any], from_plain: Callable[[Any], T]) -> None:
    """Have instances of a class of the core sent as plain data.

    ``from_plain`` must do no harm whatever it is given.
    """
    _kinds[kind.__name__] = (kind, to_plain, from_plain)


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
        """Return the next tensor. The size is checked first: a stranger may claim any shape."""
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
    within = containing | {id(value)}
    if kind is list and id(value) not in containing:
        return [_encoded(item, tensors, within) for item in value]
    # A subclass, such as a named tuple, would arrive as another type.
    known, to_plain, _ = _kinds.get(kind.__name__, (None, repr, repr))
    if known is not kind or id(value) in containing:
        raise NotPlainError(f"{kind.__module__}.{kind.__qualname__} is not plain data")
    return {kind.__name__: _encoded(to_plain(value), tensors, within)}


def _encoded_tensor(value: Tensor, tensors: list[Tensor]) -> list[Any]:
    """Return the dtype and the shape of a tensor as JSON, and append its content to ``tensors``."""
    if value.layout != torch.strided or value.requires_grad or value.is_meta:
        raise NotPlainError(f"a {value.dtype} tensor of layout {value.layout} is not plain data")
    name = _name_of(value.dtype)
    tensors.append(value.cpu().resolve_conj().resolve_neg().contiguous())
    return [name, list(value.shape)]


def _decoded(value: Any, content: _Content) -> Any:
    """Return the value that was encoded as JSON. Any error means that the JSON was not made by ``_encoded``."""
    if isinstance(value, list):
        return [_decoded(item, content) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, plain)] = value.items()
    if kind == "tensor":
        return content.take(_DTYPES[plain[0]], plain[1])
    plain = _decoded(plain, content)
    # A tuple of the elements of a tensor would need a hundred times the memory of what was sent.
    if kind not in _kinds or not isinstance(plain, (str, list, tuple)):
        raise ValueError(f"unknown kind {kind!r}, or another content than it has")
    return _kinds[kind][2](plain)


def _name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype; NotPlainError is raised for rare ones, such as quantised ones."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise NotPlainError(f"{dtype} is not plain data")
    return name


def _pairs(value: dict[Any, Any]) -> list[list[Any]]:
    """Return keys and values: JSON's own dicts have strings as keys."""
    return [list(item) for item in value.items()]


def _ordered_parts(value: OrderedDict[Any, Any]) -> list[Any]:
    """Return keys and values, and the attribute in which torch's state dicts have the versions of modules."""
    if vars(value).keys() - {"_metadata"}:
        raise NotPlainError("an OrderedDict with attributes is not plain data")
    return [_pairs(value), getattr(value, "_metadata", None)]


def _ordered(parts: list[Any]) -> OrderedDict[Any, Any]:
    items, metadata = parts
    value = OrderedDict(items)
    if metadata is not None:
        vars(value)["_metadata"] = metadata
    return value


# By the name of a class: the class, and functions to and from plain data.
_kinds: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "complex": (complex, lambda number: [number.real, number.imag], lambda parts: complex(*parts)),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "device": (torch.device, str, torch.device),
    "dtype": (torch.dtype, _name_of, _DTYPES.__getitem__),
    "Size": (torch.Size, list, torch.Size),
    "tuple": (tuple, list, tuple),
    "dict": (dict, _pairs, dict),
    "Counter": (Counter, _pairs, lambda pairs: Counter(dict(pairs))),
    "OrderedDict": (OrderedDict, _ordered_parts, _ordered),
}
