"""Nested batches: applying a function to every tensor, and making an empty batch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from unitrain.errors import DataError


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
        clone.update(zip(batch, parts, strict=True))
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
    """Return the same structure with every ``x`` that is not a container replaced by ``leaf(x)``."""
    parts = _open_parts(batch)
    return leaf(batch) if parts is None else _refilled(batch, [rebuilt(part, leaf) for part in parts.values()])


def tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors in a batch."""
    parts = _open_parts(batch)
    if parts is not None:
        for part in parts.values():
            yield from tensors(part)
    elif isinstance(batch, Tensor):
        yield batch


def without_rows(one: Any, two: Any) -> Any:
    """Return an empty batch, derived from the batch of a sample and the batch of the same sample twice.

    A dimension that is twice as long in the second has size 0 in the result. Values that are equal in both are kept.

    Raises:
        DataError: a value is neither equal nor twice as long.
    """
    if isinstance(one, (Tensor, np.ndarray)) and isinstance(two, type(one)):
        twice = [d for d in range(one.ndim) if one.ndim == two.ndim and two.shape[d] == 2 * one.shape[d] > 0]
        if one.shape == two.shape:
            return one
        if len(twice) == 1:
            return one[(slice(None),) * twice[0] + (slice(0),)]
    elif isinstance(one, (list, tuple)) and not hasattr(one, "_fields") and len(two) == 2 * len(one) > 0:
        return type(one)()
    else:
        parts, others = _parts(one), _parts(two)
        if parts is not None and others is not None and list(parts) == list(others):
            return _refilled(one, [without_rows(parts[key], others[key]) for key in parts])
        if parts is None and isinstance(one, (str, bytes, int, float, type(None))) and one == two:
            return one
    raise DataError(
        f"a global batch has fewer samples than there are ranks, and an empty batch for the others can't be made from "
        f"one that contains a {type(one).__name__}: set drop_last=True, or use fewer processes."
    )
