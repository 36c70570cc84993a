"""Nested batches: applies a function to every tensor in mappings, lists, tuples and dataclasses.

torch's own ``tree_map`` is private, and takes neither dataclasses nor mappings of other classes than torch registers.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor


def _parts(batch: Any) -> dict[Any, Any] | None:
    """Return the items of a container, by key, field or index; None for anything else."""
    if isinstance(batch, Mapping):
        return dict(batch.items())
    if isinstance(batch, (list, tuple)):
        return dict(enumerate(batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return None


def _refilled(batch: Any, parts: Sequence[Any]) -> Any:
    """Return a container like ``batch`` with other items, in the order of ``_parts``."""
    if isinstance(batch, MutableMapping):
        clone = copy.copy(batch)  # keeps attributes of a subclass: a default factory, say
        clone.update(zip(batch, parts, strict=True))  # all keys, so nothing of the copied one is left
        return clone
    if isinstance(batch, Mapping):
        return type(batch)(dict(zip(batch, parts, strict=True)))  # type: ignore[call-arg]
    if isinstance(batch, (list, tuple)):
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    clone = copy.copy(batch)
    for field, part in zip(dataclasses.fields(batch), parts, strict=True):
        object.__setattr__(clone, field.name, part)  # it may be frozen
    return clone


def _open_parts(batch: Any) -> dict[Any, Any] | None:
    """Like ``_parts``, except for containers with a method ``to``: a PackedSequence, a tokenizer's output."""
    return None if callable(getattr(batch, "to", None)) else _parts(batch)


def rebuilt(batch: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return the same structure with every ``x`` that is not a container replaced by ``leaf(x)``.

    Containers are copied, so that the batch is not changed. An object with a method ``to`` is a leaf.
    """
    parts = _open_parts(batch)
    return leaf(batch) if parts is None else _refilled(batch, [rebuilt(part, leaf) for part in parts.values()])


def tensors(batch: Any, *, opened: bool = False) -> Iterator[Tensor]:
    """Yield the tensors in a batch, and with ``opened`` in containers with a method ``to``, too."""
    parts = _parts(batch) if opened else _open_parts(batch)
    if parts is not None:
        for part in parts.values():
            yield from tensors(part, opened=opened)
    elif isinstance(batch, Tensor):
        yield batch
