"""The keyword arguments of ``strategy.dataloader``, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from torch.utils.data import Sampler


class LoaderOptions(TypedDict, total=False):
    """Options of ``strategy.dataloader``; see ``unitrain.data.Loader`` for their meaning."""

    global_batch_size: int | None
    batch_size: int | None
    micro_batch_size: int | None
    shuffle: bool
    sampler: Sampler[int] | Sequence[int] | None
    batch_sampler: Sampler[list[int]] | Sequence[Sequence[int]] | None
    drop_last: bool
    sample_seeding: bool
    sharded: bool | None
    collate_fn: Callable[[list[Any]], Any] | None
    multiprocessing_context: Any
    num_workers: int | None
    persistent_workers: bool | None
    pin_memory: bool | None
    prefetch_factor: int | None
    timeout: float | None
    worker_init_fn: Callable[[int], None] | None
