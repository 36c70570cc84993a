"""The orders of epochs, from the dataset or from samplers, and the plans that shard them."""

from __future__ import annotations

import hashlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from unitrain.data.order.order import InOrder, Shuffled
from unitrain.data.order.sharding import BatchPlan, EpochPlan
from unitrain.errors import DataError
from unitrain.rng import derived_seed, generators_restored, seed_generators

Plan: TypeAlias = EpochPlan | BatchPlan


class Order(Protocol):
    """The order of the samples in an epoch."""

    def take(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at these positions."""


class Epoch(NamedTuple):
    """One epoch: its plan and its order."""

    plan: Plan
    order: Order
    repeats: bool
    """Whether a sample may occur more than once."""


class Orders(ABC):
    """Makes the epochs of a map-style dataset, from a plan that all of them share."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    @abstractmethod
    def epoch(self, seed: int, number: int, start: int) -> Epoch:
        """Return epoch ``number`` of a run with ``seed``, from position ``start`` on."""

    def split_by(self, shares: tuple[int, ...], accumulate: int) -> None:
        """Split the epochs that are planned from now on by other shares, into another number of micro-batches."""
        self._plan = replace(self._plan, shares=shares, accumulate=accumulate)

    def drawn(self, seed: int, number: int) -> str:
        """Return a digest of an epoch's indices, if they come from a sampler and were drawn last; else ""."""
        return ""

    def forget(self) -> None:
        """Draw the indices of the next epoch anew: the script may have changed the sampler since ``len()``, say."""


class OwnOrder(Orders):
    """The dataset's own order, or a shuffled one."""

    def __init__(self, plan: EpochPlan, shuffle: bool) -> None:
        super().__init__(plan)
        self._shuffle = shuffle

    def epoch(self, seed: int, number: int, start: int) -> Epoch:
        """See ``Orders``."""
        order = Shuffled(self._plan.samples, seed, number) if self._shuffle else InOrder()
        return Epoch(replace(self._plan, start=start), order, repeats=False)


class SamplerOrder(Orders):
    """An order that a sampler or a batch sampler draws for each epoch, the same on every rank.

    A sampler that yields more than ``most`` indices for an epoch, and more than its length, has no end.
    """

    def __init__(self, plan: Plan, sampler: Iterable[Any], most: int) -> None:
        super().__init__(plan)
        self._sampler = _Seeded(sampler)
        self._most = most
        self._length = 0
        with suppress(Exception):  # a batch sampler has a length only if its sampler has one
            self._length = operator.length_hint(sampler)
        self._last: tuple[tuple[int, int], _Listed] | None = None

    def epoch(self, seed: int, number: int, start: int) -> Epoch:
        """See ``Orders``."""
        order = self._draw(seed, number)
        if isinstance(self._plan, BatchPlan):
            return Epoch(replace(self._plan, sizes=order.sizes, start=start), order, repeats=True)
        return Epoch(replace(self._plan, samples=len(order.indices), start=start), order, repeats=True)

    def drawn(self, seed: int, number: int) -> str:
        """See ``Orders``."""
        return self._last[1].digest if self._last is not None and self._last[0] == (seed, number) else ""

    def forget(self) -> None:
        """See ``Orders``."""
        self._last = None

    def _draw(self, seed: int, number: int) -> _Listed:
        if self._last is None or self._last[0] != (seed, number):
            drawn = self._sampler.draw(seed, number)
            listed = self._batches(drawn) if isinstance(self._plan, BatchPlan) else self._indices(drawn)
            self._last = ((seed, number), listed)
        return self._last[1]

    def _indices(self, drawn: Iterator[Any]) -> _Listed:
        """Return what a sampler has drawn, or raise DataError if it has no end."""
        indices = _as_array(islice(drawn, max(self._most, self._length) + 1))
        self._check_end(len(indices), len(indices))
        return _Listed(indices)

    def _batches(self, drawn: Iterator[Any]) -> _Listed:
        """Return what a batch sampler has drawn, or raise DataError if it has no end."""
        sizes: list[int] = []

        def batches() -> Iterator[Sequence[int]]:
            total = 0
            for batch in drawn:
                if len(batch):
                    sizes.append(len(batch))
                    self._check_end(total := total + len(batch), len(sizes))
                    yield batch

        return _Listed(_as_array(chain.from_iterable(batches())), tuple(sizes))

    def _check_end(self, indices: int, items: int) -> None:
        """Raise DataError if the sampler has yielded so much that it seems to have no end."""
        if indices > self._most and items > self._length:
            raise DataError(
                f"a sampler yielded more than {self._most} indices for one epoch: it seems to have no end. Let it end, "
                "with itertools.islice in its __iter__, say, after as many as an epoch is to have."
            )


def _as_array(indices: Iterable[Any]) -> NDArray[np.int64]:
    return np.fromiter(map(operator.index, indices), np.int64)  # np.fromiter would round floats


class _Listed:
    """Indices that a sampler has drawn, the sizes of the batches if it is a batch sampler, and a digest of them."""

    def __init__(self, indices: NDArray[np.int64], sizes: tuple[int, ...] = ()) -> None:
        self.indices = indices
        self.sizes = sizes
        self.digest: str = hashlib.blake2b(indices.tobytes(), digest_size=8).hexdigest()

    def take(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.indices[positions]


class _Seeded:
    """A sampler that is seeded with seed and epoch. Its use restores the state of every generator.

    A generator of the sampler itself is seeded with its initial seed as well: another seed gives another order.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler
        own = (getattr(one, "generator", None) for one in _nested(sampler))
        self._own = [(one, one.initial_seed()) for one in own if isinstance(one, torch.Generator)]

    def draw(self, seed: int, epoch: int) -> Iterator[Any]:
        for sampler in _nested(self._sampler):
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)
        states = [generator.get_state() for generator, _ in self._own]
        try:
            with generators_restored():
                seed_generators(derived_seed("sampler", seed, epoch))
                for generator, initial in self._own:
                    generator.manual_seed(derived_seed("sampler", seed, epoch, initial) >> 1)
                yield from self._sampler
        finally:
            for (generator, _), state in zip(self._own, states, strict=True):
                generator.set_state(state)


def _nested(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and the samplers that it wraps."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
