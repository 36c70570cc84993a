"""Batches on their way to the device: copied ahead of use, beside the computation, where the device is a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from unitrain.data.structure import rebuilt, tensors

T = TypeVar("T")


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with every tensor in it on ``device``; whatever else has a ``to`` method is moved by that."""
    # What comes to the host must have arrived when it is used; a GPU's stream sees to that itself.
    non_blocking = device.type != "cpu"

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=non_blocking)
        if not callable(getattr(value, "to", None)):
            return value
        if non_blocking and _takes_non_blocking(value.__class__):
            return value.to(device, non_blocking=True)
        return value.to(device)

    return rebuilt(batch, move)


@lru_cache
def _takes_non_blocking(kind: type) -> bool:
    """Whether the ``to`` of a class of the user's has a parameter of that name, as torch's does."""
    if issubclass(kind, PackedSequence):  # which passes all that it is given on to a tensor's
        return True
    try:
        return "non_blocking" in inspect.signature(kind.to).parameters  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):  # an attribute of the object, or not written in Python
        return False


def feed(batches: Iterator[tuple[T, Any]], device: torch.device) -> Iterator[tuple[T, Any]]:
    """Yield each batch, with what belongs to it, on the device.

    On a GPU the next batch is copied on a stream of its own while this one is computed with. From page-locked memory
    that takes neither the CPU's time nor the computation's.
    """
    if device.type != "cuda":
        for label, batch in batches:
            yield label, to_device(batch, device)
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ahead: tuple[T, Any, torch.cuda.Event] | None = None
    for label, batch in batches:
        with torch.cuda.stream(stream):
            copied = rebuilt(batch, lambda value: to_device(value, device) if isinstance(value, Tensor) else value)
            arrival = stream.record_event()
        if ahead is not None:
            yield _arrived(*ahead, device)
        ahead = (label, copied, arrival)
    if ahead is not None:
        yield _arrived(*ahead, device)


def _arrived(label: T, batch: Any, arrival: torch.cuda.Event, device: torch.device) -> tuple[T, Any]:
    """Let the computation wait for a copy, and its memory for the computation."""
    computing = torch.cuda.current_stream(device)
    computing.wait_event(arrival)
    for tensor in tensors(batch):
        if tensor.is_cuda:
            tensor.record_stream(computing)
    # What has a `to` of its own is moved only now: its memory could not be told to wait.
    return label, to_device(batch, device)
