"""Batches are nested: what is done to every tensor in one, and what remains of one that has no samples."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from unitrain.errors import DataError


def _parts(batch: Any) -> dict[Any, Any] | None:
    """Return what a container holds, by key, name or place; None for anything else."""
    if isinstance(batch, Mapping):
        return dict(batch.items())
    if isinstance(batch, (list, tuple)):
        return dict(enumerate(batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return None


def _refilled(batch: Any, parts: Sequence[Any]) -> Any:
    """Return a container like ``batch`` with other parts, in the order of ``_parts``."""
    if isinstance(batch, MutableMapping):
        clone = copy.copy(batch)  # keeps what a subclass has besides its items: a default factory, say
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
    """``_parts``, but of no container that knows itself how it is moved: a PackedSequence, a tokenizer's output."""
    return None if callable(getattr(batch, "to", None)) else _parts(batch)


def rebuilt(batch: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return the same structure with ``leaf(x)`` in place of each ``x`` in it that is no container."""
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
    """Return what a batch of no samples looks like, told from the batches of a sample and of that sample twice.

    What is twice as long in the second has length 0 in the result; what is the same in both stays.

    Raises:
        DataError: something is neither.
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
        f"a global batch has fewer samples than there are ranks, and a batch with a {type(one).__name__} in it "
        "can't be cut to 0 rows for the others: set drop_last=True, or take fewer processes."
    )
