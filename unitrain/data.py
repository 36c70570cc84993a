"""A strategy's loader: each process's share of a dataset, each sample exactly once, at the right weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data import default_collate as torch_default_collate

from unitrain.errors import ConfigError, DataError, nearest
from unitrain.order import Shuffled
from unitrain.sharding import EpochPlan

if TYPE_CHECKING:
    from unitrain.strategy import Strategy

_PASSED_ON = (
    "collate_fn", "multiprocessing_context", "num_workers", "persistent_workers", "pin_memory", "prefetch_factor",
    "timeout", "worker_init_fn",
)  # fmt: skip
_OURS = {
    "generator": "the order follows from the strategy's seed and the epoch",
    "batch_sampler": "a batch is a share of the global batch; give sampler= and a batch size",
    "pin_memory_device": "the strategy knows its device",
    "in_order": "batches come in order, or no run could be repeated",
}


class Loader:
    """Iterates over this rank's share of a map-style dataset. Made by ``strategy.dataloader``.

    Every rank gets the same number of batches, already on its device. Where a global batch has fewer samples than
    there are ranks, the others get an empty batch: the same structure with tensors of 0 rows, which weighs nothing in
    ``strategy.step`` and the meters. Each new iteration begins the next epoch.

    Args:
        strategy: whose ranks share the data.
        dataset: map-style (``__getitem__`` and ``__len__``), or a torch ``DataLoader`` to be converted.
        global_batch_size: samples of one optimizer step over all processes and micro-batches; results then do not
            depend on the number of processes.
        batch_size: PyTorch's: samples of one batch of one process. Give exactly one of the two.
        shuffle: a new order each epoch, which depends on the strategy's seed and the epoch alone.
        sampler: yields the indices of an epoch, in place of ``shuffle``; every rank draws the same ones.
        drop_last: leave out the samples that do not fill a last step.
        **settings: ``DataLoader``'s, with torch's meaning: collate_fn, num_workers, persistent_workers, pin_memory,
            prefetch_factor, timeout, worker_init_fn, multiprocessing_context.

    Attributes:
        dataset: what was given.
        epoch: the epoch that the next iteration yields, or the one under way.
        global_batch_size: samples of one optimizer step over all processes.

    Raises:
        ConfigError: settings that contradict each other or torch does not know.
        DataError: a dataset that can't be sharded.
    """

    def __init__(
        self,
        strategy: Strategy,
        dataset: Any,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
        sampler: Sampler[int] | Sequence[int] | None = None,
        drop_last: bool = False,
        **settings: Any,
    ) -> None:
        _check_settings(settings)
        if isinstance(dataset, DataLoader):
            dataset, batch_size, shuffle, sampler, drop_last, settings = _converted(
                dataset, global_batch_size, batch_size, settings
            )
        _check_dataset(dataset)
        if sampler is not None and shuffle:
            raise ConfigError("a loader takes shuffle=True or a sampler, which has an order of its own, not both.")
        self.dataset = dataset
        self.epoch = 0
        self._strategy = strategy
        self._shuffle = shuffle
        self._sampler = sampler
        self._drop_last = drop_last
        self.global_batch_size = self._global_batch(global_batch_size, batch_size)
        self._started = False
        self._plan = self._make_plan()
        self._shares = _Shares()
        on_gpu = strategy.device.type == "cuda"
        pinned = strategy.config.pin_memory
        settings.setdefault("pin_memory", on_gpu if pinned is None else pinned)
        collate = settings.pop("collate_fn", None) or torch_default_collate
        self._generator = torch.Generator()
        self._batches: DataLoader[Any] = DataLoader(
            _Samples(dataset),
            batch_sampler=self._shares,
            collate_fn=_Collate(collate),  # type: ignore[arg-type]
            generator=self._generator,
            **settings,
        )

    def _global_batch(self, global_batch_size: int | None, batch_size: int | None) -> int:
        if (global_batch_size is None) == (batch_size is None):
            raise ConfigError(
                "a loader needs exactly one of global_batch_size (samples of one step over all processes) and "
                f"batch_size (of one batch of one process); got {global_batch_size} and {batch_size}."
            )
        given = global_batch_size if batch_size is None else batch_size
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise ConfigError(f"a batch size is a whole number of at least 1, not {given!r}.")
        accumulate = self._strategy.config.accumulate
        if batch_size is not None:
            return batch_size * self._strategy.world_size * accumulate
        if given < accumulate:
            raise ConfigError(f"global_batch_size {given} can't be cut into accumulate={accumulate} micro-batches.")
        return given

    def _make_plan(self) -> EpochPlan:
        samples = len(self.dataset) if self._sampler is None else len(self._sampler)  # type: ignore[arg-type]
        plan = EpochPlan(
            samples,
            self.global_batch_size,
            self._strategy.config.accumulate,
            self._strategy.rank,
            self._strategy.world_size,
            self._drop_last,
        )
        if plan.steps == 0:
            raise DataError(
                f"no batch can be made: {samples} samples, a global batch of {self.global_batch_size}, "
                f"drop_last={self._drop_last}. Give more data or a smaller batch."
            )
        return plan

    def __len__(self) -> int:
        """Return the number of batches (micro-batches) in an epoch, the same on every rank."""
        return self._plan.micro_batches

    @property
    def steps(self) -> int:
        """Optimizer steps in an epoch."""
        return self._plan.steps

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left of ``total``, and see to it that each is iterated as such."""
        for epoch in range(self.epoch, total):
            self.epoch, self._started = epoch, False
            yield epoch

    def _order(self) -> NDArray[np.int64]:
        if self._sampler is not None:
            # Every rank draws the same indices, and its own generators stay where they were.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._epoch_seed(0))
                return np.fromiter(self._sampler, dtype=np.int64)
        if self._shuffle:
            return Shuffled(self._plan.samples, self._strategy.config.seed, self.epoch).take(np.arange(self._plan.samples))
        return np.arange(self._plan.samples)

    def _epoch_seed(self, rank: int) -> int:
        state = np.random.SeedSequence([self._strategy.config.seed, self.epoch, rank]).generate_state(1, np.uint64)
        return int(state[0] >> 1)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches of the next epoch, on the device."""
        if self._started:
            self.epoch += 1
        self._started = True
        order = self._order()
        if len(order) != self._plan.samples:
            raise DataError(f"the sampler's len() is {self._plan.samples}, but it yielded {len(order)} indices.")
        self._shares.set(self._plan, order)
        self._generator.manual_seed(self._epoch_seed(self._strategy.rank))
        step = self._strategy._training_step
        for micro_batch, batch in zip(self._plan, self._batches, strict=True):
            # Asked anew for each batch: an evaluation may begin and end within a training epoch.
            training = torch.is_grad_enabled() and not self._strategy.evaluating
            on_device = to_device(batch, self._strategy.device)
            if training:
                step.hand_out(micro_batch)
            yield on_device
        if step.micro_batch is not None and not self._strategy.evaluating and torch.is_grad_enabled():
            step.hand_out(None)


class _Shares:
    """The batch sampler under a loader: this rank's indices of each micro-batch of the epoch under way."""

    def __init__(self) -> None:
        self._plan: EpochPlan | None = None
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    def set(self, plan: EpochPlan, order: NDArray[np.int64]) -> None:
        self._plan, self._order = plan, order

    def __iter__(self) -> Iterator[_Indices]:
        assert self._plan is not None
        for micro_batch in self._plan:
            mine = self._order[micro_batch.start + self._plan.rank : micro_batch.stop : self._plan.world_size]
            if micro_batch.count:
                yield _Indices(mine.tolist())
            else:
                yield _Indices([int(self._order[micro_batch.start])], empty=True)

    def __len__(self) -> int:
        assert self._plan is not None
        return self._plan.micro_batches


class _Indices(list[int]):
    """Indices of one batch; of an empty one, an index to learn the structure from."""

    def __init__(self, indices: list[int], *, empty: bool = False) -> None:
        super().__init__(indices)
        self.empty = empty

    def __reduce__(self) -> Any:
        return _indices, (list(self), self.empty)


def _indices(indices: list[int], empty: bool) -> _Indices:
    return _Indices(indices, empty=empty)


class _Fetched(list[Any]):
    """The samples of one batch, and whether they stand for none."""

    empty = False


class _Samples(Dataset[Any]):
    """The dataset, fetched a batch at a time."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: _Indices) -> _Fetched:
        if callable(getattr(self._dataset, "__getitems__", None)):
            fetched = _Fetched(self._dataset.__getitems__(list(indices)))
        else:
            fetched = _Fetched(self._dataset[index] for index in indices)
        fetched.empty = indices.empty
        return fetched


class _Collate:
    """The user's collate function, which never sees a batch of no samples."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: _Fetched) -> Any:
        batch = self._collate(list(samples))
        return _cut_to_nothing(batch) if samples.empty else batch


def _cut_to_nothing(batch: Any) -> Any:
    """Return a batch of one sample as the same structure with 0 rows."""
    if isinstance(batch, Tensor) and batch.dim() > 0:
        return batch[:0]
    if isinstance(batch, Mapping):
        return type(batch)({key: _cut_to_nothing(value) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_cut_to_nothing, batch))
    if isinstance(batch, (list, tuple)):
        if all(isinstance(item, (str, bytes)) for item in batch):
            return type(batch)()
        return type(batch)(map(_cut_to_nothing, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: _cut_to_nothing(getattr(batch, f.name)) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **fields)
    raise DataError(
        f"a global batch has fewer samples than there are ranks, and a batch with a {type(batch).__name__} in it "
        "can't be cut to 0 rows for the others: set drop_last=True, or take fewer processes."
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with every tensor in it on ``device``; whatever has a ``to`` method is moved by that."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return type(batch)({key: to_device(value, device) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(item, device) for item in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(item, device) for item in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: to_device(getattr(batch, f.name), device) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **fields)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    return batch


def _check_settings(settings: dict[str, Any]) -> None:
    for name in settings:
        if name in _OURS:
            raise ConfigError(f"a strategy's loader does not take {name!r}: {_OURS[name]}.")
        if name not in _PASSED_ON:
            raise ConfigError(
                f"a loader has no setting {name!r}.{nearest(name, _PASSED_ON)} It takes {', '.join(_PASSED_ON)}."
            )


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{type(dataset).__name__} can't be read by index, so its samples can't be dealt out to the ranks: give a "
            "map-style dataset (__getitem__ and __len__), such as list(dataset) where it fits in memory."
        )
    if not hasattr(dataset, "__len__"):
        raise DataError(f"{type(dataset).__name__} has no __len__: without it no epoch can be planned.")


def _converted(
    loader: DataLoader[Any], global_batch_size: int | None, batch_size: int | None, settings: dict[str, Any]
) -> tuple[Any, int | None, bool, Any, bool, dict[str, Any]]:
    """Take a torch DataLoader apart, or say how to rewrite it."""
    if loader.batch_size is None:
        raise DataError(
            "a DataLoader with a batch_sampler of its own, or without batches, can't be converted: write "
            "strategy.dataloader(dataset, sampler=..., batch_size=...) instead."
        )
    if type(loader.sampler) is RandomSampler and not loader.sampler.replacement and loader.sampler._num_samples is None:
        shuffle, sampler = True, None
    elif type(loader.sampler) is SequentialSampler:
        shuffle, sampler = False, None
    else:
        shuffle, sampler = False, loader.sampler
    if global_batch_size is None and batch_size is None:
        batch_size = loader.batch_size
    taken = {name: getattr(loader, name) for name in _PASSED_ON if getattr(loader, name, None) is not None}
    if not loader.num_workers:
        taken.pop("multiprocessing_context", None)
    return loader.dataset, batch_size, shuffle, sampler, loader.drop_last, {**taken, **settings}
