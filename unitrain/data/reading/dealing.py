"""The shards of a dataset: how they are dealt out to ranks and workers, and the reading of one.

A sharded dataset has fixed shards, by default one for each rank and worker. They make ``groups`` of ``parts`` shards
each. A global batch is a *turn*: turn ``t`` takes the next samples of each shard of group ``t % groups``. So the global
batches depend on the shards, and not on the ranks and workers that read them: of ``W`` ranks, rank ``r`` reads every
``W``-th part of each group; if there are fewer parts than ranks, several ranks read one, and each keeps its share. Of
``N`` workers of a rank, worker ``w`` reads every ``N``-th group.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data._utils import worker as torch_worker

from unitrain.communication import plain_data
from unitrain.data.reading.fingerprint import sample_digest
from unitrain.rng import derived_seed, seed_generators


class Dealing(NamedTuple):
    """How the shards of a dataset are dealt out in an epoch.

    Attributes:
        parts: number of shards that a turn takes samples of.
        groups: number of groups of as many shards, which take turns.
    """

    parts: int
    groups: int
    size: int
    """Number of samples in a turn."""
    earlier_sizes: tuple[tuple[int, int], ...] = ()
    """A turn and the size of the turns until then, for each other size that this epoch was begun with."""

    def taken(self, part: int, turn: int) -> int:
        """Return how many samples of a shard are in a turn, unless it has ended."""
        size = next((size for end, size in self.earlier_sizes if turn < end), self.size)
        return len(range(part, size, self.parts))

    def shares(self, rank: int, world_size: int) -> list[tuple[int, slice]]:
        """Return the parts that a rank reads, and which of their samples in a turn it keeps, as a slice."""
        if world_size <= self.parts:
            return [(part, slice(None)) for part in range(rank, self.parts, world_size)]
        # Ranks that read the same part take its samples in turn.
        part = rank % self.parts
        return [(part, slice(rank // self.parts, None, len(range(part, world_size, self.parts))))]

    def kept(self, rank: int, world_size: int) -> int:
        """Return how many samples of a turn a rank keeps, unless shards have ended."""
        return sum(len(range(part, self.size, self.parts)[share]) for part, share in self.shares(rank, world_size))


class Seek(NamedTuple):
    """Where a shard continues after a turn."""

    part: int
    group: int
    turn: int
    state: Any
    """The state of the dataset; None if the shard has ended: many begin anew from their state then."""


class Beginning(NamedTuple):
    """How a shard begins: with another sample in another iteration if its order is not reproducible."""

    part: int
    group: int
    digest: int
    """Of its first sample."""


@dataclass
class Reader:
    """Reads a shard, in the process of a worker or in the main process.

    Its random numbers depend on the seed, the shard and the turn, and not on the process. Without ``seek``, the samples
    before the first turn are read again, and dropped.
    """

    dataset: Any
    dealing: Dealing
    part: int
    group: int
    seed: int
    epoch: int
    seek: Seek | None = None
    """Where the shard continues after the last turn; None if its dataset has no state to continue from."""
    sample: Any = None
    """The sample that was read last, for a stand-in; None before the first."""
    beginning: Beginning | None = None
    """How the shard begins, if it was read from there."""

    def __post_init__(self) -> None:
        self._shard: Any = None
        self._samples: Iterator[Any] | None = None
        self.ended: bool = self.seek is not None and self.seek.state is None

    def read(self, turn: int) -> list[Any]:
        """Return the shard's samples of a turn; none once it has ended.

        Args:
            turn: its number. Turns of the shard's group must be read in ascending order, and each one once.
        """
        if self.ended:
            self.seek = None  # the turn in which it ended has yielded it
            return []
        info = None  # a shard of the method ``shard`` is not to be split again
        if library(self.dataset) in LIBRARIES or not is_dealt(self.dataset):
            # They look here for their shard, also if there is a single group.
            groups, seed = self.dealing.groups, self._seed_of(-1)
            info = torch_worker.WorkerInfo(id=self.group, num_workers=groups, seed=seed, dataset=self.dataset)
        with as_worker(info), environment(RANK=self.part, WORLD_SIZE=self.dealing.parts):
            samples = self._read(turn)
            state = state_of(self._shard) if is_dealt(self.dataset) and not self.ended else None
        self.seek = Seek(self.part, self.group, turn, state) if self.ended or state is not None else None
        return samples

    def _read(self, turn: int) -> list[Any]:
        """Read a turn, and before the first one, open the shard where it continues."""
        if self._samples is None:
            seed_generators(seed := self._seed_of(-1))
            shard = _shard_of(self.dataset, self.dealing, self.part, self.group, self.epoch, seed)
            self._shard, self._samples = opened(shard, None if self.seek is None else self.seek.state)
            first = self.group if self.seek is None else self.seek.turn + self.dealing.groups
            # Turn by turn, since each one is seeded: a dataset then shuffles and augments as it did the first time.
            for past in range(first, turn, self.dealing.groups):
                self._next(past)
        return self._next(turn)

    def _next(self, turn: int) -> list[Any]:
        assert self._samples is not None
        seed_generators(self._seed_of(turn))
        count = 0 if self.ended else self.dealing.taken(self.part, turn)
        samples = list(islice(self._samples, count))
        if samples and self.sample is None and self.seek is None:
            self.beginning = Beginning(self.part, self.group, sample_digest(samples[0]))
        self.ended = self.ended or len(samples) < count
        self.sample = samples[-1] if samples else self.sample
        return samples

    def _seed_of(self, turn: int) -> int:
        """Return the seed of a turn; with -1, of the time before the first."""
        return derived_seed("shard", self.seed, self.epoch, self.part, self.group, turn)


# Hugging Face's streams are split by the library, WebDataset's by their splitters.
LIBRARIES = ("datasets", "webdataset")


def library(dataset: Any) -> str:
    """Return the name of the package of a dataset."""
    return type(dataset).__module__.partition(".")[0]


def is_dealt(dataset: Any) -> bool:
    """Return whether a dataset is of a library that shards its datasets, or has a method ``shard``."""
    return library(dataset) in LIBRARIES or callable(getattr(dataset, "shard", None))


def _shard_of(dataset: Any, dealing: Dealing, part: int, group: int, epoch: int, seed: int) -> Any:
    """Return a shard of a dataset, or the dataset if it shards itself, by the rank and worker that it finds."""
    if library(dataset) == "datasets":
        # The group is chosen by the library itself, from the worker that it finds: see ``Reader.read``.
        from datasets.distributed import split_dataset_by_node  # an optional dependency

        dataset = split_dataset_by_node(dataset, part, dealing.parts)
    elif library(dataset) == "webdataset":
        dataset = copy.copy(dataset)
        # Stages are copied, since the script's own dataset must not be changed.
        dataset.pipeline = [_seeded(copy.copy(stage), seed) for stage in dataset.pipeline]
    elif callable(getattr(dataset, "shard", None)):
        index = group * dealing.parts + part
        dataset = dataset.shard(num_shards=dealing.parts * dealing.groups, index=index)
    if callable(getattr(dataset, "set_epoch", None)):
        dataset.set_epoch(epoch)
    return dataset


def _seeded(stage: Any, seed: int) -> Any:
    """Let a shuffle of WebDataset follow from ``seed``: by default, it follows from the time, or counts iterations."""
    if getattr(getattr(stage, "f", None), "__name__", "") == "_shuffle":
        stage.args = stage.args[:2]
        stage.kw = {**stage.kw, "seed": None, "rng": random.Random(seed)}
    elif isinstance(getattr(stage, "epoch", None), int):
        stage.seed = seed
    return stage


def is_stateful(value: Any) -> bool:
    """Return whether a dataset has a state, as ``Stateful`` of torchdata."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def opened(dataset: Any, state: Any) -> tuple[Any, Iterator[Any]]:
    """Return a dataset and an iterator over it; unless ``state`` is None, a copy of the dataset in that state.

    The iterator must be the only one: many datasets keep their state in the dataset, and not in the iterator.
    """
    if state is not None:
        dataset = copy.copy(dataset)
        dataset.load_state_dict(copy.deepcopy(state))
    return dataset, iter(dataset)


def state_of(dataset: Any) -> Any:
    """Return the state of a dataset; None if there is none to continue from exactly, in plain data."""
    if not is_stateful(dataset) or _loses_samples(dataset):
        return None
    try:
        # A copy: the dataset may change its state later, while a checkpoint waits to be written.
        return plain_data.decode(plain_data.encode(dataset.state_dict()))
    except plain_data.NotPlainError:
        return None


def _loses_samples(dataset: Any) -> bool:
    """Return whether a Hugging Face stream can't continue from its state exactly.

    A state lacks the content of a shuffle buffer and of batches of Arrow, and one of concatenated streams that were
    split can't be loaded.
    """
    if library(dataset) != "datasets":
        return False
    remaining = [dataset._ex_iterable]
    for layer in remaining:  # the list grows
        remaining += getattr(layer, "ex_iterables", [layer.ex_iterable] if hasattr(layer, "ex_iterable") else [])
    names = " ".join(type(layer).__name__ for layer in remaining)
    return getattr(dataset._formatting, "is_table", False) or "Buffer" in names or "Concatenated" in names


@contextmanager
def as_worker(info: torch_worker.WorkerInfo | None) -> Iterator[None]:
    """Let a dataset, which might shard itself over workers, find this information; None if it is to find no worker."""
    real, torch_worker._worker_info = torch_worker._worker_info, info
    try:
        yield
    finally:
        torch_worker._worker_info = real


@contextmanager
def environment(**variables: int) -> Iterator[None]:
    """Set the environment variables by which datasets shard themselves; not every launcher sets them."""
    saved = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
