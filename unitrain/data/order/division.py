"""``Batching`` and ``Division``: where a feature decides which samples of a global batch each rank takes.

Without one, the samples of a global batch are divided by their number alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from unitrain.data.order.order import Order


class Division(ABC):
    """Divides each global batch of a dataset among micro-batches and ranks. Workers that read a stream have copies."""

    @property
    def limit(self) -> str:
        """The argument that limits micro-batches, such as "max_cost=40", if it determines their number; else ""."""
        return ""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Plain data that must be the same on all ranks, by the names that an error message uses."""
        return {}

    @abstractmethod
    def in_epoch(self, order: Order) -> Self:
        """Return the division of positions in the order of an epoch of a map-style dataset."""

    @abstractmethod
    def parts(self, samples: Any, first: int, cuts: int, shares: Sequence[int]) -> list[list[NDArray[np.int64]]]:
        """Return the positions of each rank in each micro-batch of a global batch.

        Args:
            samples: its positions, or, in a stream, samples.
            first: the position of the first.
            cuts: number of micro-batches, unless ``limit`` determines it.
            shares: the shares of the ranks.
        """


class Batching(Protocol):
    """The option ``batching`` of ``strategy.dataloader``."""

    def division(self, dataset: Any, *, is_stream: bool) -> Division:
        """Return the division of a dataset. Raise ConfigError or DataError if it can't be divided."""
