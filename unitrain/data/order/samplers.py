"""The orders of epochs, from the dataset or from samplers, and the plans that shard them."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from unitrain.data.order.order import InOrder, Order, Shuffled
from unitrain.data.order.sharding import BatchPlan, EpochPlan, Plan
from unitrain.errors import DataError
from unitrain.rng import derived_seed, generators_restored, seed_generators

# For one epoch, of a small dataset: more than that take seconds to draw.
_MOST_INDICES = 2**23


class Epoch(NamedTuple):
    """One epoch: its plan and its order."""

    plan: Plan
    order: Order
    repeats: bool
    """Whether a sample may occur more than once."""


class Orders:
    """Makes the epochs of a map-style dataset, from a plan that all of them share.

    Their order is the dataset's, or a shuffled one, or drawn from a sampler or a batch sampler for each epoch. It is
    the same on every rank, without communication, as far as the sampler draws from generators that are seeded. The
    plan's division may change it.

    Args:
        plan: how each epoch is sharded, without the sizes that a sampler determines.
        samples: returns the number of samples in the dataset, which may change between epochs.
        shuffle: shuffle each epoch.
        sampler: a sampler of indices, or with a ``BatchPlan`` of lists of indices.
    """

    def __init__(
        self,
        plan: Plan,
        samples: Callable[[], int],
        *,
        shuffle: bool = False,
        sampler: Iterable[Any] | None = None,
    ) -> None:
        self._plan = plan
        self._samples = samples
        self._shuffle = shuffle
        self._sampler = sampler
        # Each with its initial seed: a generator with another seed gives another order.
        generators = (getattr(level, "generator", None) for level in _nested(sampler))
        self._generators = [(g, g.initial_seed()) for g in generators if isinstance(g, torch.Generator)]
        self._last: tuple[tuple[int, int, int], _Drawn] | None = None

    def epoch(self, seed: int, number: int, start: int) -> Epoch:
        """Return epoch ``number`` of a run with ``seed``, from position ``start`` on.

        If the order comes from a sampler, this draws it, unless it was drawn last: for millions of indices it takes
        seconds.

        Raises:
            DataError: the sampler seems to have no end, or the length of the dataset has changed under a division.
        """
        plan, order, repeats = epoch = self._epoch(seed, number, start)
        if plan.division is None:
            return epoch
        if isinstance(self._plan, EpochPlan) and self._samples() != self._plan.samples:
            raise DataError(
                f"the dataset has {self._samples()} samples, but had {self._plan.samples} when the loader was made, "
                "and batching= knows of these only: make a new loader, with lengths for all samples."
            )
        return Epoch(replace(plan, division=plan.division.in_epoch(order)), order, repeats)

    def _epoch(self, seed: int, number: int, start: int) -> Epoch:
        samples = self._samples()
        if self._sampler is None:  # the order is computed by position, so that nothing is stored for an epoch
            assert isinstance(self._plan, EpochPlan)
            order = Shuffled(samples, seed, number) if self._shuffle else InOrder()
            return Epoch(replace(self._plan, samples=samples, start=start), order, repeats=False)
        # Kept, as len() and the check of the ranks' orders ask for the same epoch, and a second draw could differ.
        if self._last is None or self._last[0] != (seed, number, samples):
            yielded = self._draw(self._sampler, seed, number)
            is_batches = isinstance(self._plan, BatchPlan)
            indices, sizes = self._batches(yielded) if is_batches else (self._indices(yielded), ())
            digest = hashlib.blake2b(indices.tobytes(), digest_size=8).hexdigest()
            self._last = (seed, number, samples), _Drawn(indices, sizes, digest)
        drawn = self._last[1]
        drawn_size = {"sizes": drawn.sizes} if isinstance(self._plan, BatchPlan) else {"samples": len(drawn.indices)}
        return Epoch(replace(self._plan, start=start, **drawn_size), drawn, repeats=True)

    def drawn(self, seed: int, number: int) -> str:
        """Return a digest of an epoch's indices, if they come from a sampler and were drawn last; else ""."""
        return self._last[1].digest if self._last is not None and self._last[0][:2] == (seed, number) else ""

    def forget(self) -> None:
        """Draw the indices of the next epoch anew: the script may have changed the sampler since ``len()``, say."""
        self._last = None

    def _draw(self, sampler: Iterable[Any], seed: int, number: int) -> Iterator[Any]:
        """Yield from the sampler, seeded with seed and epoch. The state of every generator is restored."""
        for level in _nested(sampler):
            # Samplers that are made for distributed training derive their order from it.
            if callable(getattr(level, "set_epoch", None)):
                level.set_epoch(number)
        states = [generator.get_state() for generator, _ in self._generators]
        try:
            with generators_restored():
                seed_generators(derived_seed("sampler", seed, number))
                for generator, initial in self._generators:
                    generator.manual_seed(derived_seed("sampler", seed, number, initial) >> 1)
                yield from sampler
        finally:
            for (generator, _), state in zip(self._generators, states, strict=True):
                generator.set_state(state)

    def _indices(self, drawn: Iterator[Any]) -> NDArray[np.int64]:
        """Return the indices that a sampler has drawn.

        Raises:
            DataError: it seems to have no end.
        """
        most = max(_MOST_INDICES, 16 * self._samples())
        indices = np.fromiter(map(operator.index, islice(drawn, most + 1)), np.int64)  # which would round floats
        if len(indices) > most:
            raise DataError(
                f"a sampler yielded more than {most} indices for one epoch: it seems to have no end. Let it end, "
                "with itertools.islice in its __iter__, say, after as many as an epoch is to have."
            )
        return indices

    def _batches(self, drawn: Iterator[Any]) -> tuple[NDArray[np.int64], tuple[int, ...]]:
        """Return the indices in a batch sampler's batches, joined, and the sizes of those that are not empty."""
        sizes: list[int] = []

        def batches() -> Iterator[Sequence[int]]:
            for batch in drawn:
                if len(batch):
                    sizes.append(len(batch))
                    yield batch

        return self._indices(chain.from_iterable(batches())), tuple(sizes)


class _Drawn(NamedTuple):
    """Indices that a sampler has drawn, the sizes of the batches if it is a batch sampler, and a digest."""

    indices: NDArray[np.int64]
    sizes: tuple[int, ...]
    digest: str

    def take(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at these positions: see ``Order``."""
        return self.indices[positions]


def _nested(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and the samplers that it wraps."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
