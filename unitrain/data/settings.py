"""The arguments of a loader: checks them, and takes over the arguments of a torch DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from unitrain.data.options import LoaderOptions, WorkerOptions
from unitrain.data.order.division import Batching, Division
from unitrain.data.order.sharding import BatchPlan, EpochPlan, Plan
from unitrain.errors import ConfigError, DataError, nearest

_PASSED_ON = tuple(WorkerOptions.__annotations__)


@dataclass
class LoaderSettings:
    """The arguments of ``strategy.dataloader``, checked. ``LoaderOptions`` documents them.

    A torch DataLoader as ``dataset`` is replaced by its dataset, and its arguments are taken over.

    Raises:
        ConfigError: arguments are unknown or contradict each other.
        DataError: the dataset can't be sharded.
    """

    dataset: Any
    global_batch_size: int | None = None
    batch_size: int | None = None
    micro_batch_size: int | None = None
    shuffle: bool = False
    sampler: Any = None
    batch_sampler: Any = None
    drop_last: bool = False
    batching: Batching | None = None
    sample_seeding: bool = True
    sharded: bool | None = None
    shards: tuple[int, int] | None = None
    passed_on: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the DataLoader."""
    division: Division | None = field(init=False, default=None)
    """Divides global batches; None if they are divided by the number of samples alone."""
    held: int | None = field(init=False, default=None)
    """Number of samples when the epoch in progress began, of a map-style dataset; None between epochs."""

    @classmethod
    def of(cls, dataset: Any, options: LoaderOptions) -> LoaderSettings:
        """Return the settings of a loader.

        Args:
            dataset: the dataset, or a torch DataLoader.
            options: keyword arguments of ``strategy.dataloader``, those for torch's DataLoader among them.

        Raises:
            ConfigError: an option is unknown; the message has the most similar one.
        """
        known = LoaderOptions.__annotations__
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"strategy.dataloader has no argument {name!r}.{nearest(name, known)} Of DataLoader's, it takes "
                    f"{', '.join(_PASSED_ON)}."
                )
        passed_on = {name: value for name, value in options.items() if name in _PASSED_ON}
        ours: dict[str, Any] = {name: value for name, value in options.items() if name not in _PASSED_ON}
        return cls(dataset, passed_on=passed_on, **ours)

    def __post_init__(self) -> None:
        if isinstance(self.dataset, DataLoader):
            self._convert(self.dataset)
        self._check_dataset()
        self._check_order()
        self._check_size()
        if self.batching is not None:
            self.division = self.batching.division(self.dataset, is_stream=self.is_iterable)

    @property
    def samples(self) -> int:
        """Number of samples of a map-style dataset in this epoch. It may change between epochs."""
        return len(self.dataset) if self.held is None else self.held

    @property
    def is_random(self) -> bool:
        """Whether the order of a map-style dataset may differ from epoch to epoch."""
        sampler = self.sampler if self.batch_sampler is None else self.batch_sampler
        return self.shuffle or isinstance(sampler, Sampler)

    @property
    def is_iterable(self) -> bool:
        """Whether the dataset is an iterable one."""
        return isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__getitem__")

    def _convert(self, loader: DataLoader[Any]) -> None:
        """Take over the arguments of a torch DataLoader. Arguments that the script passes as well take precedence."""
        kind = type(loader)
        # The loader makes another DataLoader, so an overridden __iter__ would silently do nothing. The overrides of
        # torchdata's StatefulDataLoader only add the state, which the loader has itself.
        changed = [
            name for name in ("__iter__", "_get_iterator") if getattr(kind, name) is not getattr(DataLoader, name)
        ]
        if changed and kind.__module__.partition(".")[0] != "torchdata":
            raise DataError(
                f"{kind.__name__}.{changed[0]} would not be called, and what it does to batches would be lost: pass "
                "the dataset with sampler= and collate_fn= instead, or a torch DataLoader, and change batches in the "
                "collate_fn or in the loop."
            )
        for name in ("shuffle", "sampler", "batch_sampler", "drop_last"):
            if _is_given(getattr(self, name)):
                raise ConfigError(
                    f"{name} is set by the DataLoader: pass it to the DataLoader, or pass the dataset instead."
                )
        given = {name: getattr(loader, name, None) for name in _PASSED_ON}
        self.passed_on = {**{name: value for name, value in given.items() if value is not None}, **self.passed_on}
        self.dataset, self.drop_last = loader.dataset, loader.drop_last
        if loader.batch_size is None and loader.batch_sampler is None:
            raise DataError(
                "a DataLoader without automatic batching (batch_size=None) can't be converted, since it does not "
                "define the number of samples: let the dataset yield single samples, and pass a batch size."
            )
        if not isinstance(self.dataset, IterableDataset):  # whose DataLoader has samplers without a meaning
            if loader.batch_size is None:
                self.batch_sampler = loader.batch_sampler
                return
            self.shuffle, self.sampler = _order_of(loader.sampler, self.dataset)
        if self.global_batch_size is None and self.batch_size is None:
            self.batch_size = loader.batch_size

    def _check_dataset(self) -> None:
        """Refuse, with a remedy, datasets that a loader can't read more than once or can't count."""
        name = type(self.dataset).__name__
        if self.is_iterable:
            if not hasattr(self.dataset, "__iter__"):
                raise DataError(f"{name} is not a dataset: it has neither __getitem__ nor __iter__.")
            if isinstance(self.dataset, Iterator) and not isinstance(self.dataset, IterableDataset):
                raise DataError(
                    f"a {name} is an iterator, which can be read only once: pass a dataset whose __iter__ returns a "
                    "new iterator."
                )
        elif not hasattr(self.dataset, "__len__"):
            raise DataError(f"{name} has no __len__, which a map-style dataset needs.")

    def _check_order(self) -> None:
        """Refuse more than one order, and samplers that shard already."""
        given = [name for name in ("shuffle", "sampler", "batch_sampler") if _is_given(getattr(self, name))]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are mutually exclusive.")
        if given and self.is_iterable:
            raise ConfigError(f"{given[0]} is not supported for an iterable dataset, which defines its own order.")
        if _only_shards(self.sampler, self.dataset):
            raise ConfigError(
                "strategy.dataloader shards the dataset itself, so that a DistributedSampler would shard it twice: "
                f"pass shuffle={self.sampler.shuffle} instead."
            )
        for sampler in (self.sampler, self.batch_sampler, getattr(self.batch_sampler, "sampler", None)):
            replicas = getattr(sampler, "num_replicas", 1)
            if replicas > 1:
                raise ConfigError(
                    f"a {type(sampler).__name__} of {replicas} replicas yields the indices of one rank, but the loader "
                    "shards those of all ranks, which must be the same on every rank: make it with num_replicas=1 and "
                    "rank=0."
                )

    def _check_size(self) -> None:
        """Refuse batch sizes that are missing, contradict each other or are no such numbers."""
        if self.batch_sampler is not None:
            sizes = (self.global_batch_size, self.batch_size, self.micro_batch_size)
            if self.drop_last or any(size is not None for size in sizes):
                raise ConfigError(
                    "batch_sampler is mutually exclusive with global_batch_size, batch_size, micro_batch_size and "
                    "drop_last."
                )
            return
        if (self.global_batch_size is None) == (self.batch_size is None):
            raise ConfigError(
                "pass exactly one of global_batch_size (samples per optimizer step, over all processes) and batch_size "
                f"(samples per batch of one process); got {self.global_batch_size} and {self.batch_size}."
            )
        if self.micro_batch_size is not None and self.global_batch_size is None:
            raise ConfigError("micro_batch_size needs global_batch_size, which it splits.")
        for given in (self.global_batch_size, self.batch_size, self.micro_batch_size):
            if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
                raise ConfigError(f"a batch size must be an integer of at least 1, not {given!r}.")

    def plan(self, rank: int, world_size: int, shares: tuple[int, ...], accumulate: int) -> Plan:
        """Return the plan of an epoch, without the sizes that only a stream or a batch sampler tells.

        Args:
            rank: of this process.
            world_size: number of processes.
            shares: each rank's share of the samples, in lowest terms.
            accumulate: the setting.

        Raises:
            ConfigError: batch sizes and ``accumulate`` contradict each other.
        """
        common: dict[str, Any] = {
            "rank": rank, "world_size": world_size, "shares": shares, "division": self.division,
        }  # fmt: skip
        if self.batch_sampler is not None:
            return BatchPlan(accumulate=accumulate, **common)
        accumulate = self._micro_batches(shares, accumulate)
        global_batch = self.global_batch_size or (self.batch_size or 0) * world_size * accumulate
        if global_batch < accumulate:
            raise ConfigError(
                f"global_batch_size {global_batch} can't be split into accumulate={accumulate} micro-batches: it must "
                f"be at least {accumulate}."
            )
        return EpochPlan(
            samples=0 if self.is_iterable else len(self.dataset),
            global_batch=global_batch,
            drop_last=self.drop_last,
            accumulate=accumulate,
            **common,
        )

    def _micro_batches(self, shares: Sequence[int], accumulate: int) -> int:
        """Return the number of micro-batches per optimizer step: ``accumulate``, unless ``micro_batch_size`` is given.

        With that, the largest of the shares of a micro-batch has at most ``micro_batch_size`` samples. With a
        division's limit, the number differs from step to step.

        Raises:
            ConfigError: two of the three are set.
        """
        limits = [self.division.limit] if self.division is not None and self.division.limit else []
        limits += [] if self.micro_batch_size is None else [f"micro_batch_size={self.micro_batch_size}"]
        limits += [f"accumulate={accumulate}"] if accumulate > 1 else []
        if len(limits) > 1:
            raise ConfigError(
                f"{' and '.join(limits)} are mutually exclusive: each determines the number of micro-batches per step."
            )
        if self.micro_batch_size is None:
            return accumulate  # 1 with a division's limit
        assert self.global_batch_size is not None  # checked
        return -(-self.global_batch_size // (self.micro_batch_size * sum(shares) // max(shares)))


def _is_given(value: Any) -> bool:
    # Of flags, False is the default, and of objects None. A sampler without elements is given nevertheless.
    return value is not None and value is not False


def _order_of(sampler: Any, dataset: Any) -> tuple[bool, Any]:
    """Return a DataLoader's sampler as ``shuffle`` and ``sampler``.

    torch's own over the whole dataset are replaced by the loader's order, which is the same on any number of ranks;
    others are kept.
    """
    if _only_shards(sampler, dataset):
        return sampler.shuffle, None
    if _is_over(sampler, RandomSampler, dataset):
        whole = not sampler.replacement and sampler.num_samples == len(dataset)
        if whole and sampler.generator is None:  # with one of the user's, the order follows from its seed as well
            return True, None
    if _is_over(sampler, SequentialSampler, dataset):
        return False, None
    return False, sampler


def _only_shards(sampler: Any, dataset: Any) -> bool:
    """Return whether a sampler shards the dataset, and may shuffle it, as the loader does. A subclass may do more."""
    return _is_over(sampler, DistributedSampler, dataset)


def _is_over(sampler: Any, kind: Any, dataset: Any) -> bool:
    """Return whether a sampler is of this class, and yields indices of the whole dataset, and not of another."""
    if type(sampler) is not kind:
        return False
    source = sampler.dataset if kind is DistributedSampler else sampler.data_source
    return bool(len(source) == len(dataset))
