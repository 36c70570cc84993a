"""The training loop, as loaders tell of it: what is yielded to train on, and where the run can be stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from unitrain.data.loop import Iteration
from unitrain.data.sharding import MicroBatch
from unitrain.training.step import TrainingStep

Batches = Iterator[tuple[MicroBatch, Any]]


class LoopObserver(Protocol):
    """What wants to measure the batches that are trained on."""

    def batches(self, fed: Batches) -> Batches:
        """Return an iterator that yields the same."""


class TrainingLoop:
    """What a strategy's loaders tell of the loop around them; see ``unitrain.data.loop.LoopListener``.

    Args:
        step: trains on what loaders yield.
        pass_boundary: is called where the run can be stopped, and raises where it is to stop.

    Attributes:
        evaluating: whether an evaluation is under way.
    """

    def __init__(self, step: TrainingStep, pass_boundary: Callable[[], None]) -> None:
        self._step = step
        self._pass_boundary = pass_boundary
        self._observer: LoopObserver | None = None
        self.evaluating = False

    def observe(self, observer: LoopObserver) -> None:
        """Let an observer see the batches of every iteration that begins from now on."""
        self._observer = observer

    def is_training(self) -> bool:
        """Return whether batches are asked for to train on."""
        return torch.is_grad_enabled() and not self.evaluating

    def boundary(self) -> None:
        """Let the run be stopped here, unless it trains and gradients wait for the rest of their window."""
        if not (self._step.within_window and self.is_training()):
            self._pass_boundary()

    def yields(self, micro_batch: MicroBatch | None, iteration: Iteration) -> None:
        """Take note of what is about to be trained on."""
        self._step.take(micro_batch, iteration)

    def observed(self, batches: Batches) -> Batches:
        """Return what the loader is to yield from."""
        return batches if self._observer is None or not self.is_training() else self._observer.batches(batches)
