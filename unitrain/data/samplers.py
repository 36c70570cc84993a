"""The orders of epochs, from the dataset or from samplers, and the plans that shard them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from unitrain.data.order import InOrder, Shuffled
from unitrain.data.sharding import BatchPlan, EpochPlan
from unitrain.rng import derived_seed, generators_restored, seed_generators

Plan = TypeVar("Plan", EpochPlan, BatchPlan)


class Order(Protocol):
    """The order of the samples in an epoch."""

    def take(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at these positions."""


class Epoch(NamedTuple):
    """One epoch: its plan and its order."""

    plan: EpochPlan | BatchPlan
    order: Order
    repeats: bool
    """Whether a sample may occur more than once."""


class Orders(Protocol):
    """Makes epochs."""

    def epoch(self, seed: int, number: int, start: int) -> Epoch:
        """Return epoch ``number`` of a run with ``seed``, from position ``start`` on."""

    def split_by(self, shares: tuple[int, ...], accumulate: int) -> None:
        """Split the epochs that are planned from now on by other shares, into another number of micro-batches."""


class _Planned(Generic[Plan]):
    def __init__(self, plan: Plan) -> None:
        self._plan: Plan = plan

    def split_by(self, shares: tuple[int, ...], accumulate: int) -> None:
        """See ``Orders``."""
        self._plan = replace(self._plan, shares=shares, accumulate=accumulate)


class OwnOrder(_Planned[EpochPlan]):
    """The dataset's own order, or a shuffled one."""

    def __init__(self, plan: EpochPlan, shuffle: bool) -> None:
        super().__init__(plan)
        self._shuffle = shuffle

    def epoch(self, seed: int, number: int, start: int) -> Epoch:
        """See ``Orders``."""
        order = Shuffled(self._plan.samples, seed, number) if self._shuffle else InOrder()
        return Epoch(replace(self._plan, start=start), order, repeats=False)


class SamplerOrder(_Planned[EpochPlan]):
    """The order of a sampler, the same indices on every rank."""

    def __init__(self, plan: EpochPlan, sampler: Iterable[int]) -> None:
        super().__init__(plan)
        self._sampler = _Seeded(sampler)
        self._drawn: tuple[tuple[int, int], NDArray[np.int64]] | None = None

    def epoch(self, seed: int, number: int, start: int) -> Epoch:
        """See ``Orders``."""
        if self._drawn is None or self._drawn[0] != (seed, number):
            self._drawn = ((seed, number), np.fromiter(self._sampler.draw(seed, number), np.int64))
        indices = self._drawn[1]
        return Epoch(replace(self._plan, samples=len(indices), start=start), _Listed(indices), repeats=True)


class BatchSamplerOrder(_Planned[BatchPlan]):
    """The order and batches of a batch sampler, the same on every rank."""

    def __init__(self, plan: BatchPlan, batch_sampler: Iterable[Sequence[int]]) -> None:
        super().__init__(plan)
        self._sampler = _Seeded(batch_sampler)
        self._drawn: tuple[tuple[int, int], NDArray[np.int64], tuple[int, ...]] | None = None

    def epoch(self, seed: int, number: int, start: int) -> Epoch:
        """See ``Orders``."""
        if self._drawn is None or self._drawn[0] != (seed, number):
            batches = [np.asarray(batch, np.int64) for batch in self._sampler.draw(seed, number) if len(batch)]
            indices = np.concatenate([np.empty(0, np.int64), *batches])
            self._drawn = ((seed, number), indices, tuple(map(len, batches)))
        _, indices, sizes = self._drawn
        return Epoch(replace(self._plan, sizes=sizes, start=start), _Listed(indices), repeats=True)


class _Listed:
    def __init__(self, indices: NDArray[np.int64]) -> None:
        self._indices = indices

    def take(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._indices[positions]


class _Seeded:
    """A sampler that is seeded with seed and epoch, and whose use restores the state of every generator.

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
