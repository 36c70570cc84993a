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
    copied = _copy(state, before)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()
    return copied


def _copy(value: Any, before: Any) -> Any:
    if isinstance(value, Tensor):
        if not isinstance(before, Tensor) or (before.shape, before.dtype) != (value.shape, value.dtype):
            before = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        return before.copy_(value.detach(), non_blocking=True)
    if isinstance(value, dict):
        by_key = before if isinstance(before, dict) else {}
        return {key: _copy(item, by_key.get(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        in_order = before if isinstance(before, (list, tuple)) and len(before) == len(value) else [None] * len(value)
        return type(value)(map(_copy, value, in_order))
    return copy.deepcopy(value)
