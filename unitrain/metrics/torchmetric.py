"""Synchronises torchmetrics metrics over the ranks of any backend."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from unitrain.communicator import Communicator
from unitrain.data.loop import BatchInUse
from unitrain.errors import UsageError

M = TypeVar("M")


def synchronise(metric: M, communicator: Communicator, in_use: BatchInUse) -> M:
    """See ``Strategy.metric``."""
    # torchmetrics is not a dependency: metrics are recognised by the attributes that they synchronise through.
    if not all(hasattr(metric, name) for name in ("dist_sync_fn", "distributed_available_fn", "_to_sync")):
        raise UsageError(
            f"metric() takes a torchmetrics Metric, not {type(metric).__name__}. For a mean, use strategy.meter()."
        )
    made: Any = metric

    def gather(state: Tensor, group: object = None) -> list[Tensor]:
        return gather_rows(state, communicator)

    made.dist_sync_fn = gather
    made.distributed_available_fn = lambda: communicator.world_size > 1
    made.update = _without_stand_ins(made, made.update, in_use)
    made.forward = _without_stand_ins(made, made.forward, in_use)
    made.to(communicator.device)
    return metric


def _without_stand_ins(metric: Any, method: Callable[..., Any], in_use: BatchInUse) -> Callable[..., Any]:
    """Return ``update`` or ``forward`` such that the stand-in of a rank without samples changes no state."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not in_use.is_stand_in:
            return method(*args, **kwargs)
        states, updates = copy.deepcopy(metric.metric_state), metric._update_count
        try:
            return method(*args, **kwargs)
        finally:
            for name, state in states.items():
                setattr(metric, name, state)
            metric._update_count, metric._computed = updates, None

    return call


def gather_rows(tensor: Tensor, communicator: Communicator) -> list[Tensor]:
    """Return the tensors of all ranks, in rank order. Their first dimensions may differ in size. Collective."""
    if tensor.dim() == 0:
        return list(communicator.all_gather(tensor))
    lengths = communicator.all_gather(torch.tensor(len(tensor))).tolist()
    padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    return [rows[:length] for rows, length in zip(communicator.all_gather(padded), lengths, strict=True)]
