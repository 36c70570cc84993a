"""The options of ``strategy.dataloader``, by their names and types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from torch.utils.data import Sampler

from unitrain.data.order.division import Batching


class WorkerOptions(TypedDict, total=False):
    """The options that are passed on to torch's ``DataLoader``, with the meaning that they have there."""

    collate_fn: Callable[[list[Any]], Any] | None
    multiprocessing_context: Any
    num_workers: int | None
    persistent_workers: bool | None
    pin_memory: bool | None
    prefetch_factor: int | None
    timeout: float | None
    worker_init_fn: Callable[[int], None] | None


class LoaderOptions(WorkerOptions, total=False):
    """Options of ``strategy.dataloader``. Either ``global_batch_size`` or ``batch_size`` is required.

    Keyword arguments of torch's ``DataLoader`` are passed on: collate_fn, num_workers, persistent_workers, pin_memory,
    prefetch_factor, timeout, worker_init_fn, multiprocessing_context. By default, workers are used only with a GPU (one
    per core of this process minus one, at most 8, and none for data in memory), with a timeout of half of ``timeout_s``
    per batch.
    """

    global_batch_size: int | None
    """Number of samples per optimizer step, over all processes and micro-batches. Results then do not depend on the
    number of processes."""
    batch_size: int | None
    """Number of samples per batch of one process, as in PyTorch; with unequal ``shares``, their mean over the
    processes."""
    micro_batch_size: int | None
    """With ``global_batch_size``: the most samples of one process per forward. The number of micro-batches per step
    then follows from the number of processes and their shares, instead of ``accumulate``."""
    shuffle: bool
    """Shuffle in each epoch, in an order that depends only on the strategy's seed and the epoch."""
    sampler: Sampler[int] | Sequence[int] | None
    """Yields the indices of an epoch, instead of ``shuffle``. It must yield the same on every rank, and is seeded for
    that."""
    batch_sampler: Sampler[list[int]] | Sequence[Sequence[int]] | None
    """Yields lists of indices, instead of a batch size and an order. Each list is the global batch of one optimizer
    step, which is split over the ranks."""
    drop_last: bool
    """Drop the last step of an epoch if it is incomplete."""
    batching: Batching | None
    """Decides which samples of a global batch each rank takes in each micro-batch, by their lengths, say. Not for a
    dataset of which each rank reads another part."""
    sample_seeding: bool
    """Seed python's, numpy's and torch's generators for each sample with (seed, epoch, sample), so that random
    augmentations don't depend on workers and ranks. For map-style datasets; True by default."""
    sharded: bool | None
    """Whether an iterable dataset yields a different part on each rank and worker. Otherwise every rank reads all of it
    and keeps its part. Default: True for datasets of Hugging Face and WebDataset, and for those with a method
    ``shard(num_shards, index)``, which is called."""
    shards: tuple[int, int] | None
    """The shards of a sharded dataset: of how many of them a global batch is made, and how many groups of as many there
    are, which take turns. The global batches then depend on these, and not on ranks and workers. For the most ranks and
    workers per rank that are to read. Default: the ranks and workers of the run."""
