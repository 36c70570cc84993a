"""All-gathers into memory that there is already, which Horovod's public functions do not offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unitrain.communication.backend import Divided


def start_gathers(hvd: Any, tensors: Sequence[Divided], rank: int, name: str, *, copies: bool) -> list[int]:
    """Start to all-gather parts of tensors into the tensors, and return Horovod's handles.

    Horovod packs those that are ready at the same time into one message.

    Args:
        hvd: ``horovod.torch``.
        tensors: the tensors.
        rank: this rank.
        name: identifies the collectives.
        copies: send a copy of this rank's parts.
    """
    gather, world = hvd.mpi_ops._allgather_async, hvd.global_process_set
    handles = []
    for i, (whole, parts) in enumerate(tensors):
        own = parts[rank].clone() if copies else parts[rank]
        handles.append(gather(own, whole, f"{name}.{i}", world))
    return handles
