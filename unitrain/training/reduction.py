"""How an optimizer's gradients come to be averaged: by the backend itself, or in the core's buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.nn import Parameter

from unitrain.backend import Backend
from unitrain.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.training.gradients import GradientReducer
from unitrain.training.precision import AUTOCAST_DTYPE

Finish = Callable[[bool], None]
"""Completes a step's averaging; its argument is ``Backend.watch_gradients``'s."""


class Reduction:
    """Averages gradients over the ranks, in every backward that is armed.

    Args:
        communicator: of this process.
        backend: averages gradients itself, or leaves that to the core's buckets.
        config: the settings.

    Attributes:
        armed: whether the coming backward communicates.
    """

    def __init__(self, communicator: Communicator, backend: Backend, config: StrategyConfig) -> None:
        self._communicator = communicator
        self._backend = backend
        self._wire_dtype = AUTOCAST_DTYPE.get(config.compression)
        # Engines that match calls by their order would mix buckets up with BatchNorm's collectives.
        self._overlap = backend.matches_by_name or not config.sync_batchnorm
        self._distributed = communicator.world_size > 1
        self._finishers: dict[Parameter, Finish] = {}
        self._reducers: list[GradientReducer] = []
        self.armed: bool = True

    def arm(self, sync: bool) -> None:
        """Say whether the coming backward communicates; before the forward, where the backend needs to know then."""
        if self._distributed and sync != self.armed:
            self.armed = sync
            self._backend.arm(sync)

    def finishers(self, parameters: Sequence[Parameter]) -> list[Finish]:
        """Return what completes the averaging of these parameters' gradients, which are watched from now on."""
        new = [p for p in parameters if p not in self._finishers]
        if new:
            self._finishers.update(dict.fromkeys(new, self._backend.watch_gradients(new) or self._bucketed(new)))
        return list(dict.fromkeys(self._finishers[p] for p in parameters))

    def _bucketed(self, parameters: Sequence[Parameter]) -> Finish:
        reducer = GradientReducer(
            parameters,
            all_reduce=self._communicator.all_reduce_async,
            armed=lambda: self.armed,
            name=f"gradients.{len(self._reducers)}",
            wire_dtype=self._wire_dtype,
            overlap=self._overlap,
        )
        self._reducers.append(reducer)
        return lambda late: reducer.finish()

    def close(self) -> None:
        """Remove every hook of the core's buckets."""
        for reducer in self._reducers:
            reducer.close()
