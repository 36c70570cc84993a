"""Copies a run's state into host memory, to be written: files of GPU tensors can't be loaded where there is no GPU."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from unitrain.data.structure import rebuilt, tensors

_STAYS = ("cpu", "meta")  # where nothing is


def snapshot(state: Any, before: Any = None) -> Any:
    """Return a copy of nested state in host memory.

    Tensors on a GPU are copied asynchronously into pinned memory, and synchronised once at the end. An earlier snapshot
    becomes invalid: its memory is reused where shape and dtype are the same, as most of the cost is that of new memory.
    """
    devices: set[torch.device] = set()
    copied = _copy(state, before, devices)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copied


def _copy(value: Any, before: Any, devices: set[torch.device]) -> Any:
    """Start to copy, and add the GPUs that are copied from to ``devices``."""
    if isinstance(value, Tensor):
        if value.is_meta:
            return value  # it stands for shards
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


def on_host(state: Any) -> Any:
    """Return nested state with copies in host memory of the tensors that are not there. Those that are one stay one."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type in _STAYS:
            return value
        if value.layout != torch.strided:
            return value.detach().cpu()
        memory = id(value.untyped_storage()), value.storage_offset(), value.shape, value.stride(), value.dtype
        if memory not in copies:
            copies[memory] = value.detach().cpu()
        return copies[memory]

    return rebuilt(state, copied) if any(tensor.device.type not in _STAYS for tensor in tensors(state)) else state
