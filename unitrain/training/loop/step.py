"""The optimizer step: backward, reduce, unscale, clip, check for non-finite values, step, zero the gradients.

The optimizer gets the gradient of the mean loss over all samples of the accumulation window on all ranks. Gradients are
not rescaled for that: backward starts from this rank's share of the window instead of 1. Only if the shares are unknown
beforehand (``weight=``), one scalar is summed over the ranks, overlapping the last backward, and the gradients are
rescaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain import call_site
from unitrain.communication.backend import Backend
from unitrain.communication.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.data.loop import BatchInUse, Iteration
from unitrain.data.order.sharding import MicroBatch
from unitrain.device import by_device
from unitrain.errors import UsageError
from unitrain.pulse import USER_CODE
from unitrain.training.batch_norm import layers as batch_norm
from unitrain.training.gradients.guard import GuardedStep, OptimizerStep
from unitrain.training.gradients.reduction import Reduction
from unitrain.training.loop.backward import run_backward
from unitrain.training.loop.batches import OpenBatches
from unitrain.training.loop.copies import CopyCheck
from unitrain.training.loop.direct_steps import DirectStepCheck
from unitrain.training.loop.loss import GradientScales, Weight, checked, refuse_reentrant_checkpointing
from unitrain.training.loop.nonfinite import NonFinitePolicy
from unitrain.training.loop.window import Window
from unitrain.training.loop.window_weights import WindowWeights
from unitrain.training.loop.windows import Windows
from unitrain.training.models.buffers import BufferSync
from unitrain.training.models.in_sync import check_in_sync
from unitrain.training.models.prepared import PreparedModules
from unitrain.training.models.supported import check_scheduler

if TYPE_CHECKING:
    from unitrain.training.optimizers.sharded import ShardedOptimizers


class StepResult(NamedTuple):
    """Result of a step. Its tensors stay on the device."""

    stepped: bool
    """Whether the optimizer made a step; False within an accumulation window."""
    grad_norm: Tensor | None = None
    """2-norm of the gradients before clipping, with ``clip_norm`` or ``grad_norm``; the same on all ranks."""
    skipped: bool = False
    """Whether the step was skipped because a loss or a gradient was not finite."""


_WAITING = "step"  # phase of the pulse while gradients are averaged
_WITHIN_WINDOW = StepResult(False)
_PLAIN_STEP = StepResult(True)


class StepObserver(Protocol):
    """Is notified when ``backward`` and ``update`` begin and end, to measure them."""

    def began(self) -> None:
        """``backward`` or ``update`` was called."""

    def ended(self) -> None:
        """It has returned, or raised."""


class TrainingStep:
    """Implements ``step``, ``backward`` and ``update`` of a strategy, and counts the steps.

    Args:
        communicator: the communicator of this process.
        backend: averages gradients, or leaves it to the core's buckets.
        prepared: the prepared modules.
        scaler: the GradScaler of fp16, else None.
        pass_boundary: called after a complete step; raises if the run is to be stopped.
        config: the settings.

    Attributes:
        in_use: the batch that the script works on.
        between_epochs: whether a training iteration has ended, and what follows it in the script is not done yet.
        at_epoch_end: called at the end of a training iteration.
        at_boundary: called between two steps, where the run could be stopped.
        before_change: called before an optimizer changes weights, with several processes.
        averages: whether gradients are averaged over the ranks; False in measurements without communication.
        sharded_optimizers: shards optimizers, with ``shard_optimizer``.
    """

    def __init__(
        self,
        communicator: Communicator,
        backend: Backend,
        prepared: PreparedModules,
        scaler: torch.amp.GradScaler | None,
        pass_boundary: Callable[[], None],
        config: StrategyConfig,
    ) -> None:
        self._communicator = communicator
        self._prepared = prepared
        self._scaler = scaler
        self._pass_boundary = pass_boundary
        self._pulse = communicator.pulse
        self._world = communicator.world_size
        self._distributed = self._world > 1
        self._accumulate = config.accumulate
        self._nonfinite = NonFinitePolicy(communicator, prepared, config.on_nonfinite)
        self._check_every = config.check_in_sync_every
        self._debug = config.debug
        self._reduction = Reduction(communicator, backend, config)
        self._buffers = BufferSync(communicator, prepared) if self._distributed and config.broadcast_buffers else None
        # A backend that averages divides by the world size; the gradient scales compensate for it.
        self._unit = self._world if backend.gradient_reduction == "mean" else 1
        self._weights = WindowWeights(communicator, self._unit, config.accumulate)
        self._scales = GradientScales(scaler)
        self._on_host = communicator.device.type == "cpu"
        self._guard = GuardedStep(
            communicator.device, config.clip_norm, config.clip_value, measure_norm=config.grad_norm
        )
        self._gradients: Callable[[Iterable[Parameter]], list[Tensor]] = _gradients
        if communicator.shards_parameters:
            from unitrain.training.gradients.sharded_guard import ShardedGuardedStep

            self._guard = ShardedGuardedStep(communicator, config.clip_norm, config.clip_value, config.grad_norm)
            self._gradients = partial(_local_gradients, to_local=backend.to_local)
        self._guarded_step: OptimizerStep = self._guard
        self.sharded_optimizers: ShardedOptimizers | None = None
        if communicator.shards and not communicator.shards_parameters:
            from unitrain.training.optimizers.sharded import ShardedOptimizers

            self.sharded_optimizers = ShardedOptimizers(communicator, lambda: self.averages)
            self.extend(self.sharded_optimizers.around)
        self._windows = Windows(
            communicator,
            backend,
            prepared,
            self._reduction,
            self._guard,
            debug=config.debug,
            sharded=self.sharded_optimizers,
            begun=self._arm_counted,
        )
        self._copies = CopyCheck(communicator)
        self._direct_steps = DirectStepCheck(prepared.has) if self._distributed else None
        self._unscaled = False
        self.in_use: BatchInUse = BatchInUse()
        self._batches = OpenBatches(self.in_use, prepared, self._arm_for)
        self.between_epochs: bool = False
        self.at_epoch_end: Callable[[], None] = lambda: None
        self.at_boundary: Callable[[], None] = lambda: None
        self.before_change: Callable[[], None] = lambda: None
        self.averages: bool = True
        self._global_step = 0
        self._at_window_end: list[Callable[[], None]] = []
        self._observers: list[StepObserver] = []

    @property
    def global_step(self) -> int:
        """Number of optimizer steps of the run so far, including those before it was resumed."""
        return self._global_step

    @global_step.setter
    def global_step(self, number: int) -> None:
        self._global_step = self._pulse.step = number

    def observe(self, observer: StepObserver) -> None:
        """Notify an observer of every call from now on."""
        self._observers.append(observer)

    def unobserve(self, observer: StepObserver) -> None:
        """Stop notifying an observer."""
        self._observers.remove(observer)

    def extend(self, extended: Callable[[OptimizerStep], OptimizerStep]) -> None:
        """Replace what steps an optimizer by what ``extended`` makes of it, to do something before or after."""
        self._guarded_step = extended(self._guarded_step)

    def register(self, optimizer: Optimizer) -> None:
        """Record an optimizer: a backward without one computes the gradients of all recorded ones."""
        self._windows.register(optimizer)

    def close(self) -> None:
        """Remove all hooks."""
        if self._direct_steps is not None:
            self._direct_steps.close()
        self._windows.close()
        self._reduction.close()
        self._batches.close()

    @property
    def micro_batch(self) -> MicroBatch | None:
        """The micro-batch that a loader yielded for training, or that was trained on, last; None without a loader."""
        return self._batches.micro_batch

    @property
    def last_is_open(self) -> bool:
        """Whether the last batch of an iteration that has ended was not trained on yet."""
        return self._batches.last_is_open

    @property
    def batch_is_open(self) -> bool:
        """Whether a loader has yielded a batch that was not trained on yet."""
        return self._batches.any_open

    def trains(self) -> bool:
        """Return whether a prepared model is in training mode."""
        return any(module.training for module in self._prepared)

    @property
    def gathers_parameters(self) -> bool:
        """Whether the forward of a prepared model is collective, since its parameters are sharded."""
        return self._communicator.shards_parameters and any(True for _ in self._prepared)

    def check_modules(self) -> None:
        """Check that the prepared modules have the parameters that they were prepared with."""
        # Between a forward and its backward, the parameters of a sharded module are others; FSDP finds new ones itself.
        if self._distributed and not self._communicator.shards_parameters:
            self._prepared.check_modules()

    @property
    def within_window(self) -> bool:
        """Whether an optimizer has gradients of an accumulation window that is not complete."""
        return self._windows.any_open

    def at_window_end(self, action: Callable[[], None]) -> None:
        """Call ``action`` once, after the step that ends all open windows."""
        self._at_window_end.append(action)

    def take(self, micro_batch: MicroBatch | None, batch: Any, iteration: Iteration) -> None:
        """Record the batch that a loader yields for training, before its forward; None at the end."""
        self._batches.take(micro_batch, batch, iteration)
        self.between_epochs = micro_batch is None
        if micro_batch is None:
            self.at_epoch_end()
        elif not micro_batch.count:
            batch_norm.ignore_stand_ins(self._prepared, self.in_use)
        self._reduction.arm(self.averages and (micro_batch is None or micro_batch.last))

    def drop(self, iteration: Iteration) -> None:
        """Forget the batches of an iteration that does not count."""
        self._batches.drop(iteration)

    def _arm_for(self, micro_batch: MicroBatch) -> None:
        self._reduction.arm(self.averages and micro_batch.last)

    def stop_averaging(self) -> None:
        """Stop averaging gradients, to measure what it costs. The ranks' weights diverge from now on."""
        self.averages = False
        self._reduction.arm(False)

    @contextmanager
    def trial(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Context manager for backwards and optimizer steps of the caller itself, which don't average gradients.

        What averages the gradients of these optimizers has its memory from now on.

        Raises:
            UsageError: gradients have been accumulated.
        """
        if self._windows.any_open:
            raise UsageError("gradients have been accumulated: call this before the loop, or between two steps.")
        windows = self._windows.of(optimizers)
        armed, micro_batch = self._reduction.armed, self.in_use.micro_batch
        self._reduction.arm(False)
        self.in_use.micro_batch = None
        try:
            with nullcontext() if self._direct_steps is None else self._direct_steps.suspended():
                yield
        finally:
            for window in windows:
                window.clear()
                if self.sharded_optimizers is not None:
                    self.sharded_optimizers.abandon(window.optimizer)
            self._reduction.arm(armed)
            self.in_use.micro_batch = micro_batch

    def _arm_counted(self, window: Window) -> None:
        if self.micro_batch is None:
            self._reduction.arm(self.averages and self._counted_last(window))

    # ------------------------------------------------------------------------------------------------- backward

    def step(self, loss: Tensor, optimizer: Optimizer, scheduler: Any, weight: Weight | None) -> StepResult:
        """Run ``backward`` and ``update`` for one optimizer."""
        if self._observers:
            self.backward(loss, (optimizer,), weight=weight)
            return self.update(optimizer, scheduler)
        self._backward(loss, (optimizer,), None, weight)
        return self._update(optimizer, scheduler)

    def backward(
        self,
        loss: Tensor,
        optimizers: Sequence[Optimizer] | None,
        *,
        sync: bool | None = None,
        weight: Weight | None = None,
    ) -> None:
        """See ``Strategy.backward``. None means all prepared optimizers."""
        if not self._observers:
            self._backward(loss, optimizers, sync, weight)
            return
        with _observed(self._observers):
            self._backward(loss, optimizers, sync, weight)

    def _backward(
        self, loss: Tensor, optimizers: Sequence[Optimizer] | None, sync: bool | None, weight: Weight | None
    ) -> None:
        if self._communicator.closed:
            raise UsageError("backward was called after strategy.close(): call it before.")
        loss = checked(loss)
        windows = self._windows.of(optimizers)
        micro_batch = self._batches.of_backward(weighted=weight is not None)
        if weight is not None and micro_batch is not None and not micro_batch.count:
            weight = 0.0  # a stand-in
        last, share = self._place_in_window(windows[0], micro_batch, sync)
        for window in windows:
            if window.witness is not None:
                self._check_gradients(window)
            self._enter(window, micro_batch, weight, last)
        own_weight: Weight = share if weight is None else weight
        scale = None
        if weight is not None or share != 1.0 or self._scaler is not None:
            scale = self._scales.of(loss, own_weight)
        if self._distributed:
            self._reduction.arm(self.averages and last)  # the core's buckets can still be armed here
            self._pulse.phase = _WAITING
            if last:
                self._check_the_ranks(loss, windows)
        inputs = None
        if len(windows) < len(self._windows):
            inputs = self._leaves(loss, windows)
        run_backward(loss, scale, inputs, windows, own_weight, self._on_host, self._distributed)
        for window in windows:
            window.fresh = False
            window.complete = window.reduced = last
            if not last:
                window.remember_gradients()
        if self._distributed:
            self._pulse.phase = USER_CODE

    def _leaves(self, loss: Tensor, windows: list[Window]) -> list[Tensor]:
        """Return the leaves of the graph that a backward for some of the optimizers is limited to."""
        if not all(window.looked_at for window in windows):
            refuse_reentrant_checkpointing(loss)
            for window in windows:
                window.looked_at = True
        return [window.leaf(p) for window in windows for p in window.trained]

    def _place_in_window(self, window: Window, micro_batch: MicroBatch | None, sync: bool | None) -> tuple[bool, float]:
        """Return whether this backward ends the window, and the share of this rank's loss in the window's mean."""
        if micro_batch is None:
            last = window.micro_batches + 1 >= self._accumulate
            return last if sync is None else sync, self._unit / (self._world * self._accumulate)
        if sync and not micro_batch.last:
            raise UsageError("sync=True can't end the window of a loader early: it ends with its last micro-batch.")
        last = micro_batch.last if sync is None else sync
        return last, micro_batch.count * self._unit / micro_batch.window

    def _check_the_ranks(self, loss: Tensor, windows: list[Window]) -> None:
        """Check that the ranks are in the same call, and that they train on different samples."""
        if self._debug:
            self._communicator.compare_calls(f"backward for {' and '.join(window.name for window in windows)}")
        if self._copies.pending and self.micro_batch is None:
            self._copies.compare(loss)

    def _counted_last(self, window: Window) -> bool:
        return window.micro_batches + 1 >= self._accumulate

    def _enter(self, window: Window, micro_batch: MicroBatch | None, weight: Weight | None, last: bool) -> None:
        """Check that a micro-batch belongs to the open window, and record its weight."""
        if micro_batch is not None and window.fresh:
            window.check_order(micro_batch)
        if not window.fresh or window.micro_batches > 0:
            if (weight is None) != (window.weight is None):
                raise UsageError("pass weight= to every backward of an accumulation window, or to none.")
            if self._distributed and window.reduced and self._unit == 1:
                # These gradients have been summed over the ranks, and will be summed again.
                self._finish(window)
                for alike in by_device(_gradients(window.parameters)):
                    torch._foreach_mul_(alike, 1 / self._world)
        window.micro_batch = micro_batch
        # Without a loader, windows of several optimizers end at different times: a forward may be armed for another.
        crossing = micro_batch is None and self._accumulate > 1 and len(self._windows) > 1
        if last and self._distributed and (crossing or not window.fresh or not self._reduction.armed):
            window.late = True
        if weight is not None and window.fresh:
            self._weights.add(window, weight, last=last)

    # --------------------------------------------------------------------------------------------------- update

    def remember_gradients(self) -> None:
        """Notice changes that the script makes to gradients before ``update``."""
        for window in self._windows:
            if not window.fresh:
                window.remember_gradients()

    def _check_gradients(self, window: Window) -> None:
        # With several optimizers, DDP moves gradients of one into its buckets during a backward for another.
        if self._unit == 1 or len(self._windows) == 1:
            window.check_gradients()

    def update(self, optimizer: Optimizer, scheduler: Any = None) -> StepResult:
        """See ``Strategy.update``."""
        if scheduler is not None:
            check_scheduler(scheduler)
        if not self._observers:
            return self._update(optimizer, scheduler)
        with _observed(self._observers):
            return self._update(optimizer, scheduler)

    def _update(self, optimizer: Optimizer, scheduler: Any) -> StepResult:
        window = self._windows.get(optimizer)
        if window is None or window.fresh:
            raise UsageError("update() was called without a backward() before it.")
        if window.complete and window.witness is not None:
            self._check_gradients(window)
        window.micro_batches += 1
        if not window.complete:
            window.fresh = True
            self._arm_counted(window)
            return _WITHIN_WINDOW
        if self._distributed:
            self._pulse.phase = _WAITING
        stepped, norm = self._average_and_step(window)
        window.clear()
        self._global_step += 1
        self._pulse.step = self._global_step
        if self._scaler is not None:
            self._update_scale(self._scaler)
        if self._distributed:
            if self._buffers is not None:
                self._buffers.after_step()
            self._pulse.phase = USER_CODE
            self._arm_counted(window)
        if self._check_every and self._global_step % self._check_every == 0:
            for module in self._prepared:
                check_in_sync(self._communicator, self._prepared.unwrap(module))
        if stepped and scheduler is not None:
            scheduler.step()
        self._end_windows()
        if stepped and norm is None:
            return _PLAIN_STEP
        return StepResult(stepped, norm, not stepped)

    def _average_and_step(self, window: Window) -> tuple[bool, Tensor | None]:
        """Finish averaging and make the step. Return whether the optimizer stepped, and the norm of the gradients."""
        if self._distributed:
            self._finish(window)
        gradients = self._gradients(window.parameters)
        if not gradients and self._communicator.is_main:
            call_site.warn(
                f"no parameter of {window.name} has a gradient, so this step changes nothing: the loss does not depend "
                "on them. If the model's parameters are others since prepare() (by a deep copy, a new layer, or "
                "load_state_dict with assign=True), prepare the new ones, with an optimizer of theirs."
            )
        if window.weight is not None or window.micro_batches != self._accumulate:
            self._weights.rescale(window, gradients)
        if self._scaler is not None and gradients:
            self._scaler.unscale_(window.optimizer)
            self._unscaled = True
        stepped, norm = False, None
        if self._distributed:  # reduced gradients show every rank's loss
            stepped, norm = self._step_watched(window, gradients)
        elif window.loss_is_finite:
            # No NaN was added to a gradient: the guard checks the losses as well.
            stepped, norm = self._guarded_step(window.optimizer, window.parameters, gradients, window.losses)
        if not stepped and (self._scaler is None or self._scaler.get_scale() <= 1.0):
            self._not_finite(window)
        # else an overflow, which the GradScaler handles until its scale reaches 1
        return stepped, norm

    def _end_windows(self) -> None:
        """Run the actions that wait for the end of all open windows, and pass the boundary."""
        if self._at_window_end and not self._windows.any_open:
            actions, self._at_window_end = self._at_window_end, []
            for action in actions:
                action()
        # With a loader, its next batch is the boundary. A single window has just ended, and needs no check.
        if self.micro_batch is None and (len(self._windows) == 1 or not self._windows.any_open):
            self.at_boundary()
            self._pass_boundary()

    def _step_watched(self, window: Window, gradients: list[Tensor]) -> tuple[bool, Tensor | None]:
        assert self._direct_steps is not None
        self._direct_steps.allowed = True
        self.before_change()
        try:
            return self._guarded_step(window.optimizer, window.parameters, gradients, ())
        finally:
            self._direct_steps.allowed = False

    def _finish(self, window: Window) -> None:
        if window.reduced and self.averages:
            for finish in window.finishers:
                finish(window.late)
        window.reduced = window.late = False

    def _update_scale(self, scaler: torch.amp.GradScaler) -> None:
        """Update the loss scale, unless gradients computed with the current one wait for their update."""
        if self._unscaled and not self._windows.any_open:
            scaler.update()
            self._unscaled = False

    def _not_finite(self, window: Window) -> None:
        """Apply ``on_nonfinite``. All ranks call this at the same step."""
        message = self._nonfinite.message(window, self._global_step + 1, distributed=self._distributed)
        if self._nonfinite.skips(message):
            return
        for one in self._windows:
            if one.complete:  # others that shared the loss
                one.clear()
        if self._scaler is not None:
            self._update_scale(self._scaler)
        self._nonfinite.end(message)


@contextmanager
def _observed(observers: Sequence[StepObserver]) -> Iterator[None]:
    for observer in observers:
        observer.began()
    try:
        yield
    finally:
        for observer in observers:
            observer.ended()


def _gradients(parameters: Iterable[Parameter]) -> list[Tensor]:
    return [gradient for p in parameters if (gradient := p.grad) is not None]


def _local_gradients(parameters: Iterable[Parameter], to_local: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return [to_local(gradient) for gradient in _gradients(parameters)]
