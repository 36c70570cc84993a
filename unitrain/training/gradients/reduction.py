"""Averages gradients over the ranks, by the backend itself or in the core's buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.nn import Parameter

from unitrain.communication.backend import Backend
from unitrain.communication.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.device import HALF_DTYPES
from unitrain.training.gradients.gradients import GradientReducer

Finish = Callable[[bool], None]
"""Completes the averaging of a step; see ``Backend.watch_gradients``."""


class Reduction:
    """Averages gradients over the ranks in every armed backward: the backend does it, or the core's buckets.

    Attributes:
        armed: whether the next backward communicates.
    """

    def __init__(self, communicator: Communicator, backend: Backend, config: StrategyConfig) -> None:
        self._communicator = communicator
        self._backend = backend
        self._wire_dtype = HALF_DTYPES.get(config.compression)
        # Libraries that match calls by order would confuse buckets with BatchNorm's collectives.
        self._overlap = backend.matches_by_name or not config.sync_batchnorm
        self._distributed = communicator.world_size > 1 and config.local_steps == 1
        self._finishers: dict[Parameter, Finish] = {}
        self._reducers: list[GradientReducer] = []
        self.armed: bool = True
        self.arm(config.accumulate == 1)

    def arm(self, sync: bool) -> None:
        """Set whether the next backward communicates. Some backends need this before the forward."""
        if self._distributed and sync != self.armed:
            self.armed = sync
            self._backend.arm(sync)

    def finishers(self, parameters: Sequence[Parameter]) -> list[Finish]:
        """Return the functions that complete the averaging of these parameters' gradients, watched from now on."""
        new = [p for p in parameters if p not in self._finishers]
        if new:
            self._finishers.update(dict.fromkeys(new, self._backend.watch_gradients(new) or self._bucketed(new)))
        return list(dict.fromkeys(self._finishers[p] for p in parameters))

    def _bucketed(self, parameters: Sequence[Parameter]) -> Finish:
        reducer = GradientReducer(
            parameters,
            self._communicator,
            armed=lambda: self.armed,
            name=f"gradients.{len(self._reducers)}",
            wire_dtype=self._wire_dtype,
            overlap=self._overlap,
        )
        self._reducers.append(reducer)
        return lambda late: reducer.finish()

    def close(self) -> None:
        """Remove the hooks of the core's buckets."""
        for reducer in self._reducers:
            reducer.close()
