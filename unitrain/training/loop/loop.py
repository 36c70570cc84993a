"""The training loop as seen by loaders: which batches are trained on, and where the run can be stopped."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch

from unitrain.communication.communicator import Communicator
from unitrain.data.loop import Batches, Iteration, optimizer_steps
from unitrain.data.order.sharding import MicroBatch
from unitrain.errors import UsageError
from unitrain.training.loop.sockets import Sockets
from unitrain.training.loop.step import TrainingStep
from unitrain.training.models import batch_norm
from unitrain.training.windows.weights import Weight
from unitrain.training.windows.windows import version_of


class TrainingLoop:
    """Receives the notifications of a strategy's loaders: see ``LoopListener``, which it implements.

    Args:
        step: makes the steps.
        sockets: the parts of the run.

    Attributes:
        readers: the ranks that read different batches.
        shares: how these share the samples of a micro-batch.
        evaluating: whether an evaluation is in progress.
        epoch_asked: whether the script has asked a loader for its epoch.
    """

    def __init__(self, step: TrainingStep, sockets: Sockets) -> None:
        self._step = step
        self._shards = sockets.communicator.sharding.of_parameters
        self._batches, self._prepared = sockets.batches, sockets.prepared
        self._pass_boundary = sockets.stopping.pass_boundary  # raises if the run is to be stopped
        # An attribute, since an interpreter that ends may leave a loop when this module has no globals any more.
        self._optimizer_steps = optimizer_steps
        self._evaluations: list[Iteration] = []  # in progress
        self._latest: Iteration | None = None  # has yielded the last batch
        # By the line that made a loader, and the order: which loader has trained last, which models and optimizers,
        # and until which step of all optimizers.
        self._orders: dict[tuple[str, tuple[int, int] | None], tuple[object, list[ref[Any]], int]] = {}
        self.readers: Communicator = sockets.readers
        # They are equal, if several ranks read the same batches.
        self.shares: tuple[int, ...] = self._prepared.shares[: self.readers.world_size]
        self.evaluating: bool = False
        self.epoch_asked: bool = False

    def begin(self, iteration: Iteration, batches: Batches) -> Batches:
        """Record that an iteration begins. Return its batches, measured by hooks if they are trained on."""
        if self.is_training():
            self.follows()
            self._batches.begin(iteration)
            # Tells at its end whether it has trained, if the script steps an optimizer itself.
            iteration.began_at = self._optimizer_steps().count
            iteration.versions = self._versions()
            for measured in self._step.hooks.batches:
                batches = measured(batches)
        return batches

    def is_training(self) -> bool:
        """Return whether batches are used for training, and not for an evaluation."""
        return torch.is_grad_enabled() and not self.evaluating

    def follows(self) -> None:
        """Record that a script has finished with the previous training iteration, and check the prepared modules.

        Raises:
            UsageError: a prepared module has parameters that are trained and were not prepared.
        """
        # Between a forward and its backward, the parameters of a sharded module are others; FSDP finds new ones itself.
        if self._step.averaging.in_step and not self._shards:
            self._prepared.check_modules()
        self._batches.between_epochs = False
        if self.is_training():
            self._reach_boundary()

    def hand_out(self, micro_batch: MicroBatch, iteration: Iteration, batch: Any) -> bool:
        """Record the next batch of an iteration: all before it have been used. Return whether this rank is to get it.

        Raises:
            Stopped: the run is stopped at this boundary.
        """
        # Checked for each batch: an evaluation may begin and end within a training epoch.
        training = self.is_training()
        if not training or (micro_batch.first and self._reach_boundary()):
            self._pass_boundary()
        iteration.take(micro_batch)
        if not micro_batch.count and not self._needs_stand_in(iteration, training=training):
            return False
        self._latest = iteration
        if training:
            self._batches.take(micro_batch, iteration, batch)
            if not micro_batch.count:
                # Hooks only where the data need them: every forward would pay for them.
                batch_norm.ignore_stand_ins(self._prepared, self._batches.current_batch)
            self._step.expect_next()
        else:
            self._batches.current_batch.is_stand_in = not micro_batch.count
            if iteration not in self._evaluations:
                self._evaluations.append(iteration)
        return True

    def _needs_stand_in(self, iteration: Iteration, *, training: bool) -> bool:
        """Return whether a rank without samples has to take part nevertheless.

        It has to in a step, in the gathers of an evaluation, and in any forward that gathers sharded parameters.
        """
        if iteration.gathers or self._gathers_parameters:
            return True
        return training and (iteration.trained or any(module.training for module in self._prepared))

    @property
    def _gathers_parameters(self) -> bool:
        """Whether the forward of a prepared model is collective, since its parameters are sharded."""
        return self._shards and any(True for _ in self._prepared)

    def _reach_boundary(self) -> bool:
        """Return whether this is between two steps, and call the hooks of a boundary if so.

        It is not while an earlier batch is open, or in an accumulation window.
        """
        if self._step.within_window or self._batches.last_is_open:
            return False
        for reached in self._step.hooks.at_boundary:
            reached()
        return True

    def leave(self, iteration: Iteration) -> bool:
        """Record that an iteration is left before its end. Return whether it counts, since it was trained on."""
        self._batches.release(iteration)
        if iteration.trained:
            return True
        iteration.end_early(self._optimizer_steps().count)
        self.end(iteration, complete=False)
        return iteration.trained

    def repeats(self, iteration: Iteration, made_at: str) -> bool:
        """Record the order of an iteration that was trained on. Return whether it repeats that of another loader.

        Only if that one had ended before, and with the same models and optimizers: two loaders may be read side by
        side, and the loaders of a cross-validation in one order.
        """
        steps = self._optimizer_steps().count
        iteration.end_early(steps)
        if not iteration.trained:
            return False
        trained: list[ref[Any]] = [ref(module) for module in self._prepared]
        trained += [key for key, version in self._versions().items() if iteration.versions.get(key) != version]
        current = iteration.loader, trained, steps
        loader, earlier, until = self._orders.get((made_at, iteration.order), current)
        self._orders[made_at, iteration.order] = current
        return loader is not iteration.loader and earlier == trained and (iteration.began_at or 0) >= until

    def _versions(self) -> dict[ref[Any], int]:
        """Return how often the parameters of each optimizer were changed in place, as its steps do."""
        return {ref(optimizer): version_of(optimizer) for optimizer in self._step.windows.optimizers}

    def gathers(self, call: str) -> None:
        """Record a collective call for a batch. In the rest of an evaluation, ranks without samples get stand-ins.

        Args:
            call: name of the call.

        Raises:
            UsageError: such a rank can't know of this call, because there was none before, and would not take part.
        """
        for iteration in self._evaluations:
            assert iteration.micro_batch is not None
            if not (iteration.micro_batch.everywhere or iteration.gathers or self._gathers_parameters):
                raise UsageError(
                    f"{call} was called for a batch of which other ranks may have no samples, and for none before it: "
                    "they would not take part. Call it after the loop, or use more data or fewer processes."
                )
            iteration.gathers = True

    def weight(self, given: Weight | None) -> float:
        """Return the weight of a result that the script has computed from its batch: the number of samples.

        Args:
            given: the weight that the script passes, or None. A stand-in has weight 0 in any case.

        Returns:
            NaN if several batches are in use, and it matters which one counts.
        """
        batches = [i.micro_batch for i in self._evaluations if i.micro_batch is not None] or self._batches.in_use
        shares = {batch.count / batch.window if given is None else float(batch.count > 0) for batch in batches}
        if len(shares) > 1 and given != 0:
            return float("nan")
        count = batches[-1].count if batches else 1
        return float(count if given is None or not count else given)

    def end(self, iteration: Iteration, *, complete: bool) -> None:
        """Record the end of an iteration. If it is not complete, its batches are forgotten: it does not count."""
        if complete and self.is_training():
            self._step.end_epoch()
            self._batches.end(iteration)
            for ended in self._step.hooks.at_epoch_end:
                ended()
            return
        if iteration in self._evaluations:
            self._evaluations.remove(iteration)
            if self._latest is iteration:  # what is gathered after it is not of its last batch
                self._batches.current_batch.is_stand_in = False
        if not complete:
            self._batches.drop(iteration)
