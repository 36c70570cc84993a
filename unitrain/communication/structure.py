"""Nested batches: applies a function to every tensor in mappings, lists, tuples and dataclasses.

torch's own ``tree_map`` is private, and takes neither dataclasses nor mappings of other classes than torch registers.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor


def _parts(batch: Any) -> dict[Any, Any] | None:
    """Return the items of a container, by key, field or index; None for anything else."""
    if isinstance(batch, (Tensor, str, int, float)):  # most often, and faster than to look for what it is not
        return None
    if isinstance(batch, Mapping):
        return dict(batch.items())
    if isinstance(batch, (list, tuple)):
        return dict(enumerate(batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return None


def refilled(batch: Any, parts: Sequence[Any]) -> Any:
    """Return a container like ``batch`` with other items, in the order of ``_parts``. No constructor of its is called.

    Args:
        batch: a container. Its attributes are kept: a default factory, say.
        parts: as many as it has, unless it is a list.
    """
    if type(batch) in (dict, list):  # most often, and compilers can't trace a copy
        return dict(zip(batch, parts, strict=True)) if type(batch) is dict else list(parts)
    if isinstance(batch, Mapping) and not isinstance(batch, MutableMapping):
        return type(batch)(dict(zip(batch, parts, strict=True)))  # type: ignore[call-arg]
    if isinstance(batch, tuple):
        if hasattr(batch, "n_sequence_fields"):  # as torch.max returns it: made in C
            return type(batch)(parts)
        new = tuple.__new__(type(batch), parts)
        if hasattr(batch, "__dict__"):
            vars(new).update(vars(batch))
        return new
    clone = copy.copy(batch)
    if isinstance(batch, list):
        clone[:] = parts
    elif isinstance(batch, MutableMapping):
        for key, part in zip(batch, parts, strict=True):
            clone[key] = part
    else:
        for field, part in zip(dataclasses.fields(batch), parts, strict=True):
            object.__setattr__(clone, field.name, part)  # it may be frozen
    return clone


def _open_parts(batch: Any, closed: type | tuple[()] = ()) -> dict[Any, Any] | None:
    """Like ``_parts``, except for containers with a method ``to``: a PackedSequence, a tokenizer's output."""
    return None if isinstance(batch, closed) or callable(getattr(batch, "to", None)) else _parts(batch)


def rebuilt(batch: Any, leaf: Callable[[Any], Any], *, closed: type | tuple[()] = (), opened: bool = False) -> Any:
    """Return the same structure with every ``x`` that is not a container replaced by ``leaf(x)``.

    A container with a part that changes is copied, so that the batch is not changed. Another one is returned itself.

    Args:
        batch: the structure.
        leaf: returns what takes the place of a leaf.
        closed: a class of containers that are leaves as well.
        opened: whether containers with a method ``to`` are rebuilt, too, and not leaves.
    """
    parts = _parts(batch) if opened else _open_parts(batch, closed)
    if parts is None:
        return leaf(batch)
    new = [rebuilt(part, leaf, closed=closed, opened=opened) for part in parts.values()]
    return batch if all(map(operator.is_, new, parts.values())) else refilled(batch, new)


def leaves(batch: Any, *, opened: bool = False) -> Iterator[Any]:
    """Yield the leaves of a structure, and with ``opened`` those in containers with a method ``to``, too."""
    waiting = [batch]
    while waiting:
        first = waiting.pop()
        parts = _parts(first) if opened else _open_parts(first)
        if parts is None:
            yield first
        else:
            waiting.extend(reversed(parts.values()))


def tensors(batch: Any, *, opened: bool = False) -> Iterator[Tensor]:
    """Yield the tensors in a batch, and with ``opened`` in containers with a method ``to``, too."""
    return (leaf for leaf in leaves(batch, opened=opened) if isinstance(leaf, Tensor))
