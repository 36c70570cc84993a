"""Moves batches to the device. On a GPU, the next batch is copied while the current one is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from unitrain.communication.structure import rebuilt, tensors
from unitrain.device import IN_STEP, streams_of

T = TypeVar("T")


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors, and other objects that have a method ``to``, on ``device``.

    A copy to a GPU is queued on the current stream: the host does not wait for it.

    Args:
        batch: nested containers; see ``structure.py``. It is not changed.
        device: the device to move to.
    """
    # Copies to the host must be complete before use; on a GPU, the stream's order ensures that.
    non_blocking = device.type not in IN_STEP

    def move(value: Any) -> Any:
        if not callable(getattr(value, "to", None)):
            return value
        if non_blocking:
            with suppress(TypeError):  # its method has no such parameter
                return value.to(device, non_blocking=True)
        return value.to(device)

    return rebuilt(batch, move)


def feed(batches: Iterator[tuple[T, Any]], device: torch.device) -> Iterator[tuple[T, Any]]:
    """Yield each pair of a label and a batch with the batch on the device.

    On a GPU, the next batch is copied on a separate stream while this one is computed. From pinned memory, that takes
    no time of the CPU's or the computation's. So on a GPU, one batch more than the script holds is in memory, and the
    loader reads one batch ahead.

    Args:
        batches: yields labels and batches.
        device: the device of this rank.
    """
    streams = streams_of(device)
    if streams is None:
        for label, batch in batches:
            yield label, to_device(batch, device)
        return
    stream = _copy_stream(device)
    ahead: tuple[T, Any, torch.Event] | None = None
    for label, batch in batches:
        with streams.stream(stream):
            copied = rebuilt(batch, lambda value: to_device(value, device) if isinstance(value, Tensor) else value)
            arrival = stream.record_event()
        if ahead is not None:
            yield _arrived(*ahead, device, streams)
        ahead = (label, copied, arrival)
    if ahead is not None:
        yield _arrived(*ahead, device, streams)


@lru_cache
def _copy_stream(device: torch.device) -> Any:
    """Return the stream for copies to a GPU. It is the same in every epoch: memory freed on one serves no other."""
    return streams_of(device).Stream(device)


def _arrived(label: T, batch: Any, arrival: torch.Event, device: torch.device, streams: Any) -> tuple[T, Any]:
    """Make the compute stream wait for a copy, and keep the copy's memory until the stream has used it."""
    computing = streams.current_stream(device)
    computing.wait_event(arrival)
    for tensor in tensors(batch):
        if not tensor.is_cpu:
            tensor.record_stream(computing)
    # Other objects are moved only now: record_stream can't be called for the memory that they hold.
    return label, to_device(batch, device)
