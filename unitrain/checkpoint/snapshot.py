"""A copy of a run's state in the host's memory, which can be written while training goes on."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor


def snapshot(state: Any, before: Any = None) -> Any:
    """Return a copy of nested state that training can no longer change.

    Tensors on a GPU are copied into page-locked memory, all at once, and waited for together.

    Args:
        state: tensors and plain data, in dicts, lists and tuples.
        before: the snapshot of an earlier save, which is given up: where tensors are of the same kind, their memory is
            used again. Most of what a copy costs is to get memory that was never touched.
    """
    devices: set[torch.device] = set()
    copied = _copy(state, before, devices)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copied


def _copy(value: Any, before: Any, devices: set[torch.device]) -> Any:
    """Begin to copy, and add the GPUs on which copies are under way to ``devices``."""
    if isinstance(value, Tensor):
        if value.is_cuda:
            devices.add(value.device)
        if not isinstance(before, Tensor) or (before.shape, before.dtype) != (value.shape, value.dtype):
            before = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        return before.copy_(value.detach(), non_blocking=True)
    if isinstance(value, dict):
        by_key = before if isinstance(before, dict) else {}
        return {key: _copy(item, by_key.get(key), devices) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        in_order = before if isinstance(before, (list, tuple)) and len(before) == len(value) else [None] * len(value)
        return type(value)(_copy(item, its, devices) for item, its in zip(value, in_order, strict=True))
    return copy.deepcopy(value)
