"""Iterable datasets: which rank reads which part, and where a resumed run continues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from unitrain import call_site
from unitrain.communication.communicator import Communicator
from unitrain.data.order.sharding import EpochPlan, MicroBatch
from unitrain.data.reading.agreement import Agreement
from unitrain.data.reading.dealing import Beginning, Dealing, Seek, is_dealt
from unitrain.data.reading.fetching import Collate, as_is
from unitrain.data.reading.stream import ShardedStream, WholeStream
from unitrain.data.reading.workers import with_deaths_explained
from unitrain.data.settings import LoaderSettings
from unitrain.errors import CheckpointError, ConfigError, DataError
from unitrain.rng import derived_seed

# How many turns of a shard the training may be behind its reading.
_KEPT = 8
_DRAW = "draw its random numbers from python's, numpy's or torch's global generators, which the loader seeds"


class _Reading(NamedTuple):
    """How an epoch is read."""

    epoch: int
    """Number of the epoch; -1 for any."""
    dealing: Dealing | None
    """None if every rank reads the whole dataset."""
    seeks: Sequence[Seek] = ()
    """Where the shards continue."""
    beginnings: Sequence[Beginning] = ()
    """How the shards have begun in the interrupted run."""


class Iterable:
    """An iterable dataset, as one rank reads it. It has the same methods as ``MapStyle``.

    Args:
        communicator: compares the first samples of the ranks, and agrees on the ends of shards.
        given: the arguments of the loader: the dataset, which is pickled for workers, and how it is sharded.
        plan: has the sizes of the steps; its number of samples is not used.
        collate: makes a batch of a list of samples.
        settings: keyword arguments of the DataLoader.

    Raises:
        ConfigError: the dataset or the batch size does not fit ``shards``, or the number of ranks.
    """

    def __init__(
        self,
        communicator: Communicator,
        given: LoaderSettings,
        plan: EpochPlan,
        collate: Collate,
        settings: dict[str, Any],
    ) -> None:
        self._dataset = given.dataset
        if given.shards is not None and not (is_sharded(given) and is_dealt(self._dataset)):
            raise ConfigError(
                f"shards is not for this {type(self._dataset).__name__}: only iterable datasets with a method "
                "shard(num_shards, index), of Hugging Face and of WebDataset are read in shards, without sharded=False."
            )
        self._communicator = communicator
        self._plan = plan
        self._collate = collate
        self._settings = settings
        self._workers: int = max(1, settings["num_workers"])
        self._agreement = Agreement(communicator, plan) if is_sharded(given) else None
        self._generator = torch.Generator()
        self._usual = self._resumed = _Reading(-1, self._dealing(given.shards) if is_sharded(given) else None)
        # By part and group of this rank's shards: where they continue after their last turns, digests of their first
        # samples, and the digests that they should have.
        self._seeks: dict[tuple[int, int], list[Seek]] = {}
        self._beginnings: dict[tuple[int, int], int] = {}
        self._expected: dict[tuple[int, int], int] = {}
        self._seeks_of = -1  # which epoch
        self._start = 0
        self._read(self._usual)

    def _dealing(self, shards: tuple[int, int] | None) -> Dealing:
        """Return how to deal out the shards in epochs that are not resumed within."""
        plan = self._plan
        parts, groups = shards or (plan.world_size, self._workers)
        if parts < 1 or groups < 1:
            raise ConfigError(f"shards is {shards}, but must be two positive ints.")
        if plan.global_batch < parts:
            raise ConfigError(_too_few(plan.global_batch, parts))
        return Dealing(parts, groups, plan.global_batch)

    def _read(self, reading: _Reading) -> None:
        """Make the DataLoader for a reading. Persistent workers of the previous one end with it."""
        self._reading = reading
        source = self._dataset, self._plan, self._collate
        _, dealing, seeks, _ = reading
        self._stream = WholeStream(*source, seeks) if dealing is None else ShardedStream(*source, seeks, dealing)
        # batch_size=None: the stream yields batches, and the DataLoader is to collect no samples.
        self._loader: DataLoader[Any] = DataLoader(
            self._stream, batch_size=None, collate_fn=as_is, generator=self._generator, **self._settings
        )

    def drawn(self, seed: int, number: int) -> str:
        """Return an empty string: a stream has no sampler."""
        return ""

    def plan(self, seed: int, number: int) -> EpochPlan:
        """Return the plan of an epoch.

        Raises:
            TypeError: the number of samples or of batches is unknown until the dataset ends, as ``len`` of torch's
                DataLoader raises it.
        """
        limited = self._plan.division is not None and self._plan.division.limit
        if self._agreement is not None or limited or not hasattr(self._dataset, "__len__"):
            raise TypeError(
                f"a loader of a {type(self._dataset).__name__} has no len(): the number of its batches is unknown "
                "until the dataset ends."
            )
        return replace(self._plan, samples=len(self._dataset))

    def read(self, stop: int) -> EpochPlan:
        """Return the plan of the epoch that was read last, up to position ``stop``, if it was read as a whole."""
        return replace(self._plan, start=self._start, samples=stop, drop_last=False)

    def _reading_of(self, number: int) -> _Reading:
        return self._resumed if self._resumed.epoch == number else self._usual

    def readers(self, number: int) -> list[Any] | None:
        """Return how the shards are dealt out in an epoch, as plain data; None if the dataset is read as a whole."""
        dealing = self._reading_of(number).dealing
        return None if dealing is None else _plain(dealing)

    def seeks(self, number: int, step: int) -> dict[str, Any]:
        """Return where the shards that this rank reads continue in step ``step`` of an epoch, for a loader's state.

        This differs between ranks: a checkpoint gathers the entries of all.
        """
        current = self._seeks_of == number
        # Workers read ahead of the training, so the newest seek of a shard may lie behind the step.
        last = ([seek for seek in of_shard if seek.turn < step][-1:] for of_shard in self._seeks.values() if current)
        seeks = [list(seek) for newest in last for seek in newest]
        beginnings = [[*shard, digest] for shard, digest in self._beginnings.items() if current]
        return {"seeks": [number, seeks, beginnings]}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from a loader's state within an epoch.

        Raises:
            CheckpointError: the shards can't be dealt out such that the rest of the epoch is read once.
        """
        number, steps = state["epoch"], state["steps"]
        epoch, shards, beginnings = state["seeks"]
        seeks = [Seek(*shard) for shard in shards if epoch == number and shard[2] < steps]
        began = [Beginning(*shard) for shard in beginnings if epoch == number]
        self._resumed = _Reading(number, self._dealing_in(state), seeks, began)
        self._seeks_of = -1  # the seeks of this loader's own reading count no more
        self._keep(self._resumed, number, steps)

    def _dealing_in(self, state: Mapping[str, Any]) -> Dealing | None:
        """Return how to deal out the shards in the rest of the epoch of a state."""
        readers, usual, samples = state["readers"], self._usual.dealing, self._plan.global_batch
        if readers is None and usual is None:
            return None
        if readers is None or usual is None:
            raise CheckpointError(
                "the dataset was sharded in another way when the state was saved: pass the same one, and the same "
                "sharded=, or start a new epoch: set loader.epoch."
            )
        # The shards stay those of the saved run, however many ranks and workers read them now.
        parts, groups, size, earlier = readers
        if not is_dealt(self._dataset) and (parts, groups) != usual[:2]:
            raise CheckpointError(
                f"{parts} ranks with {groups} workers each read this {type(self._dataset).__name__}, which shards "
                f"itself, and now {usual.parts} with {usual.groups} do: it can't continue within epoch "
                f"{state['epoch']}. Use as many as before, or start a new epoch: set loader.epoch."
            )
        if samples < parts:
            raise CheckpointError(_too_few(samples, parts))
        if size != samples:
            earlier = [*earlier, [state["steps"], size]]
        return Dealing(parts, groups, samples, tuple((turn, size) for turn, size in earlier))

    def _keep(self, reading: _Reading, number: int, step: int) -> None:
        """Keep the seeks and beginnings of shards that are known in step ``step`` of an epoch."""
        # In the epoch that this loader is reading, its own records are newer than those of the resumed state.
        if not step or self._seeks_of != number:
            self._beginnings = {shard[:2]: shard.digest for shard in reading.beginnings if step}
        self._expected = dict(self._beginnings)
        seeks = [seek for seek in reading.seeks if seek.turn < step]
        self._seeks_of, self._seeks = number, {(seek.part, seek.group): [seek] for seek in seeks}

    def batches(self, seed: int, number: int, start: int, step: int) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this rank's part of each micro-batch of an epoch, from step ``step`` and sample ``start`` on.

        Samples that were consumed are read again and skipped, unless the dataset continues from a state. Collective at
        its beginning, and for a sharded dataset in each step; see ``agreement.py``.

        Raises:
            DataError: the ranks have different first samples, a rank has none, or a worker died or hangs.
        """
        # torch draws the seeds of workers from this generator.
        self._generator.manual_seed(derived_seed("workers", seed, number, self._plan.rank) >> 1)
        reading = self._reading_of(number)
        if reading is not self._reading:
            self._read(reading)
        self._keep(reading, number, step)
        self._start = start
        dealing = reading.dealing
        if self._agreement is None or dealing is None:
            self._stream.begin(seed, number, start)
            return ((piece.micro_batch, piece.batch) for piece in self._compared(self._noted()))
        self._stream.begin(seed, number, step)
        return self._agreement.micro_batches(self._compared(self._noted()), dealing, start, step)

    def _noted(self) -> Iterator[Any]:
        """Yield the pieces that workers read, and keep their seeks and beginnings."""
        for piece in with_deaths_explained(self._loader):
            if piece is None:  # a worker without a group in this cycle: see ``ShardedStream._turns``
                continue
            for seek in piece.seeks:
                kept = self._seeks.setdefault((seek.part, seek.group), [])
                self._seeks[seek.part, seek.group] = [*kept[-_KEPT:], seek]  # training may be some turns behind
            for shard in piece.beginnings:
                if self._expected.pop(shard[:2], shard.digest) != shard.digest:
                    self._expected.clear()
                    self._warn(
                        f"is read again to continue in epoch {self._seeks_of}, and begins with another sample than "
                        "before. In another order, samples are repeated and others left out until the epoch's end: "
                        f"{_DRAW}, or give it state_dict and load_state_dict."
                    )
                self._beginnings[shard[:2]] = shard.digest
            yield piece

    def _warn(self, message: str) -> None:
        """Warn on rank 0, with the name of the dataset before the message."""
        if self._communicator.is_main:
            call_site.warn(f"this {type(self._dataset).__name__} {message}")

    def _compared(self, pieces: Iterator[Any]) -> Iterator[Any]:
        """Compare the first samples of the ranks: they must be equal exactly if each rank reads the whole dataset."""
        first = next(pieces, None)
        if self._plan.world_size > 1:
            begins = next((each.digest for each in first.beginnings), 0) if first else 0
            shared = first.shared if first and self._agreement is None else 0
            self._check_first(*self._communicator.all_gather(torch.tensor((begins, shared))).T.tolist())
        if first is None:
            return
        yield first
        pending = self._agreement is None
        for piece in pieces:
            if pending and piece.shared != first.shared:
                pending = False
                self._warn(
                    "yields different samples in each worker of the loader, which must be the same in all unless it is "
                    f"sharded: pass sharded=True if it yields a different part in each. Otherwise {_DRAW}."
                )
            yield piece

    def _check_first(self, digests: list[int], shared: list[int]) -> None:
        """Refuse samples that must be equal and differ, or warn if they should differ and are equal.

        Args:
            digests: of the first sample of each rank; 0 for a rank without samples, or that continues.
            shared: of the first sample of a stream that each rank reads as a whole; 0 for others.
        """
        if len(set(shared)) > 1:
            rank = next(rank for rank, digest in enumerate(shared) if digest != shared[0])
            raise DataError(
                f"the ranks passed different data to a loader: this {type(self._dataset).__name__} begins with another "
                f"sample on rank {rank} than on rank 0. Pass the whole dataset on every rank, in the same order: the "
                f"loader shards it. Give shuffles a seed, or {_DRAW}. If the script has given each rank its part, and "
                "nothing else splits it, pass sharded=True."
            )
        # A digest of 0 is none.
        are_equal = len(set(digests)) == 1 and digests[0]
        if are_equal and self._reading.dealing is not None and self._plan.world_size <= self._reading.dealing.parts:
            self._warn(
                "begins with the same sample on every rank: if it is not sharded, every rank trains on all of it. Pass "
                "sharded=False then."
            )


def _too_few(samples: int, parts: int) -> str:
    return f"a global batch of {samples} samples can't be made of {parts} shards: it must have a sample of each."


def _plain(dealing: Dealing) -> list[Any]:
    """Return a dealing as plain data, for checkpoints."""
    return [dealing.parts, dealing.groups, dealing.size, [list(pair) for pair in dealing.earlier_sizes]]


def is_sharded(given: LoaderSettings) -> bool:
    """Return whether each rank and worker reads another part of an iterable dataset."""
    return given.is_iterable and (is_dealt(given.dataset) if given.sharded is None else given.sharded)
