"""Sorted windows: an order with samples of similar lengths in each global batch, so that little of them is padding.

The order of an epoch is cut into windows of several global batches. The samples of a window are sorted by length and
cut into batches again, which come in random order, as in torchtext's ``BucketIterator``. (transformers' mega-batches
stay sorted.) A window follows from a position alone, so an epoch continues anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unitrain.data.order.order import Order, Shuffled

# Returns the costs of samples: by index or, in a plan, by position; in a stream, of the samples themselves.
Costs: TypeAlias = Callable[[Any], NDArray[np.float64]]


@dataclass
class SortedWindows:
    """The order of ``samples`` samples, sorted by ``lengths`` in windows of ``batches`` global batches.

    ``seed`` shuffles the batches. An incomplete last batch is not sorted, so ``drop_last`` leaves out random samples.
    """

    order: Order
    samples: int
    global_batch: int
    lengths: Costs
    batches: int
    seed: int
    _last: tuple[int, NDArray[np.int64]] = field(default=(-1, np.empty(0, np.int64)), init=False)

    def take(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at these positions of the order."""
        size = self.batches * self.global_batch
        windows = positions // size
        taken = np.empty(len(positions), np.int64)
        for window in np.unique(windows).tolist():
            inside = windows == window
            if self._last[0] != window:  # batches are looked up one after another
                self._last = window, self._sorted(window * size, size)
            taken[inside] = self._last[1][positions[inside] - window * size]
        return taken

    def _sorted(self, begin: int, size: int) -> NDArray[np.int64]:
        """Return the samples of the window that begins at a position."""
        batch = self.global_batch
        samples = self.order.take(np.arange(begin, min(begin + size, self.samples)))
        whole = len(samples) // batch * batch
        # Stable, so that all ranks sort equal lengths alike, whatever numpy they have.
        falling = np.argsort(-self.lengths(samples[:whole]), kind="stable").reshape(-1, batch)
        batches = falling[Shuffled(len(falling), self.seed, begin // size).take(np.arange(len(falling)))]
        return np.concatenate((samples[batches.ravel()], samples[whole:]))
