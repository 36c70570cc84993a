"""Synchronises torchmetrics metrics over the ranks of any backend."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from unitrain.communicator import Communicator
from unitrain.errors import UsageError

M = TypeVar("M")


def synchronise(metric: M, communicator: Communicator) -> M:
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
    made.to(communicator.device)
    return metric


def gather_rows(tensor: Tensor, communicator: Communicator) -> list[Tensor]:
    """Return the tensors of all ranks, in rank order. Their first dimensions may differ in size. Collective."""
    if tensor.dim() == 0:
        return list(communicator.all_gather(tensor))
    lengths = communicator.all_gather(torch.tensor(len(tensor))).tolist()
    padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    return [rows[:length] for rows, length in zip(communicator.all_gather(padded), lengths, strict=True)]
