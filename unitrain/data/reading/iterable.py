"""Iterable datasets: which rank reads which part, and how the ranks agree on the batches."""

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
from unitrain.data.reading.dealing import LIBRARIES, Beginning, Dealing, Seek, library
from unitrain.data.reading.fetching import Collate, as_is
from unitrain.data.reading.stream import ShardedStream, WholeStream
from unitrain.data.reading.workers import with_deaths_explained
from unitrain.errors import CheckpointError, ConfigError, DataError
from unitrain.rng import derived_seed

# How many turns of a shard the training may be behind its reading.
_KEPT = 8
_DRAW = "draw its random numbers from python's, numpy's or torch's global generators, which the loader seeds"


class _Reading(NamedTuple):
    """How an epoch is read."""

    epoch: int
    """Its number; -1 for any."""
    dealing: Dealing | None
    """None if every rank reads the whole dataset."""
    seeks: Sequence[Seek] = ()
    """Where it continues."""
    beginnings: Sequence[Beginning] = ()


class Iterable:
    """An iterable dataset, as one rank reads it.

    ``plan`` has the sizes of the steps; its number of samples is not used. ``settings`` are keyword arguments of the
    DataLoader. A ``sharded`` dataset has ``shards``: how many a global batch comes from, and how many groups of these.
    """

    def __init__(
        self,
        communicator: Communicator,
        dataset: Any,
        plan: EpochPlan,
        collate: Collate,
        *,
        sharded: bool,
        shards: tuple[int, int] | None,
        settings: dict[str, Any],
    ) -> None:
        if shards is not None and not (sharded and is_sharded(dataset)):
            raise ConfigError(
                f"shards is not for this {type(dataset).__name__}: only iterable datasets with a method "
                "shard(num_shards, index), of Hugging Face and of WebDataset are read in shards, without sharded=False."
            )
        self._communicator = communicator
        self._dataset = dataset
        self._plan = plan
        self._collate = collate
        self._settings = settings
        self._workers: int = max(1, settings["num_workers"])
        self._agreement = Agreement(communicator, plan) if sharded else None
        self._generator = torch.Generator()
        self._own = self._resumed = _Reading(-1, self._dealing(shards) if sharded else None)
        self._seeks: dict[tuple[int, int], list[Seek]] = {}  # of this rank's shards, after their last turns
        self._beginnings: dict[tuple[int, int], int] = {}  # of this rank's shards, and what they should be
        self._expected: dict[tuple[int, int], int] = {}
        self._seeks_of = -1  # which epoch
        self._read(self._own)

    def _dealing(self, shards: tuple[int, int] | None) -> Dealing:
        plan = self._plan
        if is_sharded(self._dataset):
            parts, groups = shards or (plan.world_size, self._workers)
            if plan.global_batch < parts:
                raise ConfigError(_too_few(plan.global_batch, parts))
            return Dealing(parts, groups, plan.global_batch)
        per_step = plan.world_size * plan.accumulate
        if plan.global_batch % per_step:
            raise ConfigError(
                f"global_batch_size {plan.global_batch} can't be split evenly over {plan.world_size} ranks with "
                f"accumulate={plan.accumulate}, as data that shard themselves need: make it a multiple of {per_step}."
            )
        return Dealing(plan.world_size, self._workers, plan.global_batch // plan.accumulate, loose=True)

    def _read(self, reading: _Reading) -> None:
        self._reading = reading
        what = self._dataset, self._plan, self._collate
        _, dealing, seeks, _ = reading
        self._stream = WholeStream(*what, seeks) if dealing is None else ShardedStream(*what, dealing, seeks)
        self._loader: DataLoader[Any] = DataLoader(
            self._stream, batch_size=None, collate_fn=as_is, generator=self._generator, **self._settings
        )

    def drawn(self, seed: int, number: int) -> str:
        """Return an empty string: a stream has no sampler."""
        return ""

    def plan(self, seed: int, number: int) -> EpochPlan:
        """Return the plan of an epoch."""
        limited = self._plan.division is not None and self._plan.division.limit
        if self._agreement is not None or limited or not hasattr(self._dataset, "__len__"):
            raise TypeError(
                f"a loader of a {type(self._dataset).__name__} has no len(): the number of its batches is unknown "
                "until the dataset ends."
            )
        return replace(self._plan, samples=len(self._dataset))

    def _reading_of(self, number: int) -> _Reading:
        return self._resumed if self._resumed.epoch == number else self._own

    def readers(self, number: int) -> list[Any] | None:
        """Return how the shards are dealt out in an epoch, as plain data; None if the dataset is read as a whole."""
        dealing = self._reading_of(number).dealing
        return None if dealing is None else _plain(dealing)

    def seeks(self, number: int, step: int) -> dict[str, Any]:
        """Return where the shards that this rank reads continue in step ``step`` of an epoch, for a loader's state."""
        current = self._seeks_of == number
        last = ([seek for seek in of_shard if seek.turn < step][-1:] for of_shard in self._seeks.values() if current)
        seeks = [list(seek) for found in last for seek in found]
        return {"seeks": [number, seeks, [[*shard, its] for shard, its in self._beginnings.items() if current]]}

    def resume(self, state: Mapping[str, Any]) -> int:
        """Continue from a loader's state within an epoch. Return how many samples may have to be read again."""
        number, steps = state["epoch"], state["steps"]
        epoch, shards, beginnings = state["seeks"]
        seeks = [Seek(*shard) for shard in shards if epoch == number and shard[2] < steps]
        began = [Beginning(*shard) for shard in beginnings if epoch == number]
        self._resumed = _Reading(number, self._dealing_in(state), seeks, began)
        self._seeks_of = -1  # what this loader has read itself counts no more
        self._keep(self._resumed, number, steps)
        dealing = self._resumed.dealing
        begun = 1 if dealing is None else dealing.parts * min(dealing.groups, steps)
        return 0 if len(self._seeks) == begun else int(state["consumed"])

    def _dealing_in(self, state: Mapping[str, Any]) -> Dealing | None:
        """Return how to deal out the shards in the rest of the epoch of a state."""
        readers, own, samples = state["readers"], self._own.dealing, self._plan.global_batch
        if readers is None and own is None:
            return None
        if readers is None or own is None or own.loose != (len(readers) == 3):
            raise CheckpointError(
                "the dataset was sharded in another way when the state was saved: pass the same one, and the same "
                "sharded=, or start a new epoch: set loader.epoch."
            )
        if own.loose:
            was, now = [*readers, state["global_batch_size"]], [*_plain(own), samples]
            if was != now:
                raise CheckpointError(
                    f"world size, workers per rank, batch size and global batch size were {was}, and are now {now}: a "
                    f"dataset that shards itself can't continue within epoch {state['epoch']} with others. Use the "
                    "same as before, or start a new epoch: set loader.epoch."
                )
            return own
        parts, groups, size, before = readers
        if samples < parts:
            raise CheckpointError(_too_few(samples, parts))
        if size != samples:
            before = [*before, [state["steps"], size]]
        return Dealing(parts, groups, samples, tuple((turn, size) for turn, size in before))

    def _keep(self, reading: _Reading, number: int, step: int) -> None:
        """Keep what is known of the shards in step ``step`` of an epoch."""
        if not step or self._seeks_of != number:
            self._beginnings = {shard[:2]: shard.digest for shard in reading.beginnings if step}
        self._expected = dict(self._beginnings)
        seeks = [seek for seek in reading.seeks if seek.turn < step]
        self._seeks_of, self._seeks = number, {(seek.part, seek.group): [seek] for seek in seeks}

    def batches(self, seed: int, number: int, start: int, step: int) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this rank's part of each micro-batch of an epoch, from step ``step`` and sample ``start`` on.

        Samples that were consumed are read again and skipped, unless the dataset continues from a state.
        """
        self._generator.manual_seed(derived_seed("workers", seed, number, self._plan.rank) >> 1)
        reading = self._reading_of(number)
        if reading is not self._reading:
            self._read(reading)
        self._keep(reading, number, step)
        dealing = reading.dealing
        if self._agreement is None or dealing is None:
            self._stream.begin(seed, number, start)
            return ((piece.micro_batch, piece.batch) for piece in self._compared(self._noted()))
        self._stream.begin(seed, number, 0 if dealing.loose else step)
        return self._agreement.micro_batches(self._compared(self._noted()), dealing, start, step)

    def _noted(self) -> Iterator[Any]:
        """Yield what workers read, and keep where the dataset continues."""
        for piece in with_deaths_explained(self._loader):
            if piece is None:
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
        if self._communicator.is_main:
            call_site.warn(f"this {type(self._dataset).__name__} {message}")

    def _compared(self, pieces: Iterator[Any]) -> Iterator[Any]:
        """Compare the first samples of the ranks: they must be equal exactly if each rank reads the whole dataset."""
        first = next(pieces, None)
        if self._plan.world_size > 1:
            digests = self._communicator.all_gather(torch.tensor(0 if first is None else first.first)).tolist()
            self._check_first(digests)
        if first is None:
            return
        yield first
        pending = self._agreement is None
        for piece in pieces:
            if pending and piece.first != first.first:
                pending = False
                self._warn(
                    "yields different samples in each worker of the loader, which must be the same in all unless it is "
                    f"sharded: pass sharded=True if it yields a different part in each. Otherwise {_DRAW}."
                )
            yield piece

    def _check_first(self, digests: list[int]) -> None:
        if self._agreement is None and len(set(digests)) > 1:
            raise DataError(
                f"the ranks read different samples from this {type(self._dataset).__name__}, which must be the same on "
                "all unless it is sharded: pass sharded=True if the dataset yields a different part on each rank and "
                f"worker. Otherwise {_DRAW}."
            )
        same = len(set(digests)) == 1 and digests[0]
        if same and self._reading.dealing is not None and self._plan.world_size <= self._reading.dealing.parts:
            self._warn(
                "begins with the same sample on every rank: if it is not sharded, every rank trains on all of it. Pass "
                "sharded=False then."
            )


def _too_few(samples: int, parts: int) -> str:
    return f"a global batch of {samples} samples can't be made of {parts} shards: it must have a sample of each."


def _plain(dealing: Dealing) -> list[Any]:
    """Return a dealing as plain data."""
    if dealing.loose:
        return [dealing.parts, dealing.groups, dealing.size // dealing.parts]
    return [dealing.parts, dealing.groups, dealing.size, [list(one) for one in dealing.before]]


def is_sharded(dataset: Any) -> bool:
    """Return whether a dataset is of a library that shards its datasets, or has a method ``shard``."""
    return library(dataset) in LIBRARIES or callable(getattr(dataset, "shard", None))
