"""The training loop as seen by loaders: which batches are trained on, and where the run can be stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from unitrain.data.loop import Iteration
from unitrain.data.order.sharding import MicroBatch
from unitrain.data.order.shares import Shares
from unitrain.errors import UsageError
from unitrain.training.loop.load_balancing import LoadBalancer
from unitrain.training.loop.step import TrainingStep

Batches = Iterator[tuple[MicroBatch, Any]]


class LoopObserver(Protocol):
    """Measures the batches that are trained on."""

    def batches(self, fed: Batches) -> Batches:
        """Return an iterator that yields the same batches."""


class TrainingLoop:
    """Receives the notifications of a strategy's loaders; see ``unitrain.data.loop.LoopListener``.

    Args:
        step: the training step.
        pass_boundary: called where the run can be stopped; raises if it is to be stopped.
        shares: the shares of the ranks in every micro-batch.
        balancer: sets them, if they are to be measured.

    Attributes:
        shares: as given.
        evaluating: whether an evaluation is in progress.
    """

    def __init__(
        self, step: TrainingStep, pass_boundary: Callable[[], None], shares: Shares, balancer: LoadBalancer | None
    ) -> None:
        self._step = step
        self._pass_boundary = pass_boundary
        self._evaluations: dict[Iteration, MicroBatch] = {}  # that are in progress, and their newest micro-batches
        self._observer: LoopObserver | None = None
        self._balancer = balancer
        self.shares = shares
        self.evaluating = False

    def observe(self, observer: LoopObserver) -> None:
        """Let an observer measure the batches of every iteration that starts from now on."""
        self._observer = observer

    def is_training(self) -> bool:
        """Return whether batches are used for training, and not for an evaluation."""
        return torch.is_grad_enabled() and not self.evaluating

    def needs_stand_ins(self, iteration: Iteration) -> bool:
        """Return whether a rank without samples has to take part all the same.

        It has to in a step, in the gathers of an evaluation, and in any forward that gathers sharded parameters.
        """
        if iteration.gathers or self._step.gathers_parameters:
            return True
        return self.is_training() and (iteration.trained or self._step.trains())

    def follows(self) -> None:
        """Record that what follows the previous training iteration is done, and check what is trained from now on."""
        self._step.check_modules()
        self._step.between_epochs = False
        self._reach_boundary()

    def boundary(self) -> None:
        """Allow the run to be stopped here, unless the training has not finished the batches before this one."""
        if self._reach_boundary() or not self.is_training():
            self._pass_boundary()

    def _reach_boundary(self) -> bool:
        """Return whether this is between two steps, and record it."""
        is_between = self.is_training() and not (self._step.within_window or self._step.last_is_open)
        if is_between:
            self._step.at_boundary()
        return is_between

    def yields(self, micro_batch: MicroBatch | None, batch: Any, iteration: Iteration, *, training: bool) -> None:
        """Record the batch that is about to be yielded, for training or for an evaluation."""
        if training:
            self._step.take(micro_batch, batch, iteration)
        elif micro_batch is not None:
            self._step.in_use.micro_batch = self._evaluations[iteration] = micro_batch
        else:
            self._end_evaluation(iteration)

    def gathers(self) -> None:
        """Record a gather. For the rest of an evaluation, ranks without samples of a batch get stand-ins.

        Raises:
            UsageError: they have none of this batch, and can't know, because there was no gather before.
        """
        for iteration, micro_batch in self._evaluations.items():
            if not (micro_batch.everywhere or iteration.gathers or self._step.gathers_parameters):
                raise UsageError(
                    "gather was called for a batch of which other ranks may have no samples, and for none before it: "
                    "they would not take part. Gather after the loop, or use more data or fewer processes."
                )
            iteration.gathers = True

    def balance(self) -> None:
        """Set the shares, if enough of the training was measured. Collective then."""
        if self._balancer is not None and self.is_training():
            self._balancer.settle()

    def drops(self, iteration: Iteration) -> None:
        """Forget the batches of an iteration that does not count."""
        self._end_evaluation(iteration)
        self._step.drop(iteration)

    def _end_evaluation(self, iteration: Iteration) -> None:
        """Forget an iteration of an evaluation: what is gathered after it is not of its last batch."""
        if self._evaluations.pop(iteration, None) is self._step.in_use.micro_batch:
            self._step.in_use.micro_batch = None

    def observed(self, batches: Batches) -> Batches:
        """Return the iterator that the loader yields from."""
        if not self.is_training():
            return batches
        if self._balancer is not None and self._balancer.measuring:
            batches = self._balancer.batches(batches)
        return batches if self._observer is None else self._observer.batches(batches)
