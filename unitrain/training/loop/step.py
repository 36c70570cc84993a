"""The optimizer step: backward, reduce, unscale, clip, check for non-finite values, step, zero the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from unitrain import call_site
from unitrain.communication.backend import Backend
from unitrain.communication.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.data.order.sharding import MicroBatch
from unitrain.device import by_device
from unitrain.errors import UsageError
from unitrain.pulse import USER_CODE
from unitrain.training.gradients.guard import GuardedStep
from unitrain.training.gradients.reduction import Reduction
from unitrain.training.gradients.sharded_guard import ShardedGuardedStep
from unitrain.training.hooks import Hooks
from unitrain.training.loop.backward import Weight, refuse_reentrant_checkpointing, run_backward
from unitrain.training.loop.batches import OpenBatches
from unitrain.training.loop.checks import CopyCheck, DirectStepCheck, FirstSteps, SchedulerCheck
from unitrain.training.loop.loss_check import LossCheck
from unitrain.training.loop.nonfinite import NonFinitePolicy
from unitrain.training.loop.parts import Losses, LossWeights, parts_of, run_parts
from unitrain.training.loop.spikes import Spikes
from unitrain.training.loop.weights import Weights
from unitrain.training.loop.window import Window, Windows
from unitrain.training.models.prepared import PreparedModules
from unitrain.training.models.supported import check_scheduler
from unitrain.training.optimizers.local_sgd import LocalSGD

if TYPE_CHECKING:
    from unitrain.training.optimizers.sharded import ShardedOptimizers


class StepResult(NamedTuple):
    """Result of a step. Its tensors stay on the device."""

    stepped: bool
    """Whether the optimizer made a step; False within an accumulation window."""
    grad_norm: Tensor | None = None
    """2-norm of the gradients before clipping, with ``clip_norm`` or ``grad_norm``; the same on all ranks."""
    skipped: bool = False
    """Whether the step was skipped because a loss or a gradient was non-finite, or of a spike (``on_spike``)."""


_WAITING = "step"  # phase of the pulse while gradients are averaged
_WITHIN_WINDOW = StepResult(False)
_PLAIN_STEP = StepResult(True)


class TrainingStep:
    """Implements ``step``, ``backward`` and ``update`` of a strategy, and counts the steps.

    ``pass_boundary`` is called after a complete step, and raises if the run is to be stopped.

    Attributes:
        hooks: what happens around a step.
        batches: the batches that loaders have yielded.
        local: the rounds of ``local_steps``, if it is set.
        spikes: what applies ``on_spike``, if it is set.
    """

    def __init__(
        self,
        communicator: Communicator,
        backend: Backend,
        prepared: PreparedModules,
        hooks: Hooks,
        scaler: torch.amp.GradScaler | None,
        sharded: ShardedOptimizers | None,
        pass_boundary: Callable[[], None],
        config: StrategyConfig,
    ) -> None:
        self.hooks = hooks
        self.batches: OpenBatches = OpenBatches()
        self._communicator = communicator
        self._prepared = prepared
        self._scaler = scaler
        self._unscaled = False
        self._pass_boundary = pass_boundary
        self._pulse = communicator.pulse
        self.local: LocalSGD | None = None
        if config.local_steps > 1:
            self.local = LocalSGD(communicator, prepared, config)
            hooks.add_hook(self.local)
        self._distributed = communicator.world_size > 1 and self.local is None
        self._on_host = communicator.device.type == "cpu"
        self._accumulate = config.accumulate
        averages = backend.gradient_reduction == "mean" or self.local is not None
        self._weights = Weights(communicator, config.accumulate, scaler, averages=averages)
        self._reduction = Reduction(communicator, backend, config)
        self.spikes: Spikes | None = None
        if config.on_spike != "ignore":
            self.spikes = Spikes(communicator, config.on_spike, prepared, self.optimizers)
            if config.on_spike == "rewind":
                hooks.add_hook(self.spikes)
        self._guard = _guard(communicator, config, self.spikes)
        self._nonfinite = NonFinitePolicy(communicator, prepared, config.on_nonfinite)
        self._windows = Windows(communicator, backend, prepared, self._reduction, self._guard, sharded, config)
        self._first_steps = FirstSteps(
            CopyCheck(communicator),
            LossCheck(config.accumulate, communicator.world_size),
            SchedulerCheck(pending=communicator.is_main),
        )
        self._direct_steps = DirectStepCheck(prepared.has) if communicator.world_size > 1 else None
        self._at_window_end: list[Callable[[], None]] = []

    @property
    def global_step(self) -> int:
        """Number of optimizer steps of the run so far, including those before it was resumed."""
        return self._pulse.step

    @global_step.setter
    def global_step(self, number: int) -> None:
        self._pulse.step = number

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers that were recorded."""
        return [window.optimizer for window in self._windows]

    def register(self, optimizer: Optimizer) -> None:
        """Record an optimizer: a backward without one computes the gradients of all recorded ones."""
        self._windows.register(optimizer)

    def check_complete(self) -> None:
        """Warn at the end of a run if a round is open, or the script has left out a batch, as one taken ahead."""
        if self.local is not None:
            self.local.check_complete()
        if self.batches.one_is_left_out and self._communicator.is_main:
            call_site.warn(
                "a loader has yielded a batch more than step() was called for: a batch before the first step of an "
                "epoch was left out, or the last one. The losses that followed were matched to the batch before "
                "theirs, and a resumed run would repeat one. Call step() for every batch; to leave one out, multiply "
                "its loss by 0."
            )

    def close(self) -> None:
        """Remove the hooks of parameters and optimizers."""
        if self._direct_steps is not None:
            self._direct_steps.close()
        self._windows.close()
        self._reduction.close()

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
        """Whether an optimizer has gradients of an accumulation window that is not complete, or a round is not."""
        return self._windows.any_open or (self.local is not None and self.local.is_open)

    def at_window_end(self, action: Callable[[], None]) -> None:
        """Call ``action`` once, after the step that ends all open windows, and the round of ``local_steps``."""
        self._at_window_end.append(action)

    def check_between_rounds(self, call: str) -> None:
        """Raise UsageError within a round of ``local_steps``."""
        if self.local is not None:
            self.local.check_between(call)

    def shared_weights(self, call: str | None = None, *, buffers: bool = False) -> AbstractContextManager[None]:
        """See ``LocalSGD.shared_weights``; without ``local_steps``, all weights are shared."""
        return nullcontext() if self.local is None else self.local.shared_weights(call, buffers=buffers)

    def end_round(self) -> None:
        """End the round of ``local_steps``, if one is open: average what the ranks have learned. Collective."""
        if self.local is not None and self.local.steps:
            self._average(self.local, ends=True)
            self._end_windows()

    def _average(self, local: LocalSGD, *, ends: bool) -> None:
        with self._pulse.within(_WAITING):
            steps = f"within the {local.at_stake} steps up to step {self._pulse.step}"
            if not local.average(ends=ends):
                [window] = self._windows
                self._nonfinite.end(self._nonfinite.message(window, steps, distributed=False))

    def expect_next(self, window: Window | None = None) -> None:
        """Let the next forward and backward communicate if they end a window, as far as that is known.

        Without a loader, the micro-batches of ``window`` are counted.
        """
        if self._distributed:
            following = self.batches.following
            if following is not None:
                self._reduction.arm(following.last)
            elif window is not None and self.batches.micro_batch is None:
                self._reduction.arm(window.micro_batches + 1 >= self._accumulate)

    @contextmanager
    def trial(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Context manager for backwards and optimizer steps of the caller itself, which don't average gradients.

        What averages the gradients of these optimizers has its memory from now on. UsageError is raised if gradients
        have been accumulated.
        """
        if self._windows.any_open:
            raise UsageError("gradients have been accumulated: call this before the loop, or between two steps.")
        windows = self._windows.of(optimizers)
        armed, is_stand_in = self._reduction.armed, self.batches.current_batch.is_stand_in
        self._reduction.arm(False)
        self.batches.current_batch.is_stand_in = False
        self.batches.in_trial = True
        if self._direct_steps is not None:
            self._direct_steps.allowed = True
        try:
            yield
        finally:
            self.batches.in_trial = False
            if self._direct_steps is not None:
                self._direct_steps.allowed = False
            for window in windows:
                window.clear()
                self._windows.abandon(window)
            self._reduction.arm(armed)
            self.batches.current_batch.is_stand_in = is_stand_in

    # ------------------------------------------------------------------------------------------------- backward

    def step(self, loss: Losses, optimizer: Optimizer, scheduler: Any, weight: LossWeights | None) -> StepResult:
        """Run ``backward`` and ``update`` for one optimizer."""
        if self.hooks.before_call:
            self.backward(loss, (optimizer,), weight=weight)
            return self.update(optimizer, scheduler)
        self._backward(loss, (optimizer,), None, weight)
        return self._update(optimizer, scheduler)

    def backward(
        self,
        loss: Losses,
        optimizers: Sequence[Optimizer] | None,
        *,
        sync: bool | None = None,
        weight: LossWeights | None = None,
    ) -> None:
        """See ``Strategy.backward``. None means all prepared optimizers."""
        if not self.hooks.before_call:
            self._backward(loss, optimizers, sync, weight)
            return
        with self.hooks.call("backward"):
            self._backward(loss, optimizers, sync, weight)

    def _backward(
        self, loss: Losses, optimizers: Sequence[Optimizer] | None, sync: bool | None, weight: LossWeights | None
    ) -> None:
        if self._communicator.closed:
            raise UsageError("backward() was called after strategy.close().")
        losses, weights = parts_of(loss, weight)
        check = self._first_steps.losses
        if self._pulse.step >= check.next_step and self._communicator.is_main:
            for one in losses:
                check.look(one, self._pulse.step, weighted=bool(weights))
        windows = self._windows.of(optimizers)
        micro_batch = self.batches.of_backward(weighted=bool(weights))
        if weights and micro_batch is not None and not micro_batch.count:
            weights = [*(0.0 for _ in losses), *weights[len(losses) :]]  # a stand-in
        own = self._weights.vector(weights) if len(weights) > 1 else weights[0] if weights else None
        last, share = self._place_in_window(windows[0], micro_batch, sync)
        for window in windows:
            if window.witness is not None:
                self._check_gradients(window)
            self._enter(window, micro_batch, own, last)
        if self._distributed:
            self._prepare_ranks(losses, windows, last)
        inputs = None
        if len(windows) < len(self._windows):
            inputs = self._leaves(losses, windows)
        if len(losses) > 1:
            run = partial(
                run_backward, inputs=inputs, windows=windows, on_host=self._on_host, distributed=self._distributed
            )
            run_parts(losses, weights, windows, self._weights, run, last=last)
        else:
            own_weight: Weight = share if own is None else own
            scale = None
            if own is not None or share != 1.0 or self._scaler is not None:
                scale = self._weights.scale(losses[0], own_weight)
            run_backward(losses[0], scale, inputs, windows, own_weight, self._on_host, self._distributed)
        for window in windows:
            window.fresh = False
            window.complete = window.reduced = last
            if not last:
                window.remember_gradients()
        if self._distributed:
            self._pulse.phase = USER_CODE

    def _leaves(self, losses: list[Tensor], windows: list[Window]) -> list[Tensor]:
        """Return the leaves of the graph that a backward for some of the optimizers is limited to."""
        if not all(window.looked_at for window in windows):
            for loss in losses:
                refuse_reentrant_checkpointing(loss)
            for window in windows:
                window.looked_at = True
        return [window.leaf(p) for window in windows for p in window.trained]

    def _place_in_window(self, window: Window, micro_batch: MicroBatch | None, sync: bool | None) -> tuple[bool, float]:
        """Return whether this backward ends the window, and the share of this rank's loss in the window's mean."""
        if micro_batch is None:
            last = window.micro_batches + 1 >= self._accumulate
            return last if sync is None else sync, self._weights.uncounted
        if sync and not micro_batch.last:
            raise UsageError("sync=True can't end the window of a loader early: it ends with its last micro-batch.")
        last = micro_batch.last if sync is None else sync
        return last, micro_batch.count * self._weights.unit / micro_batch.window

    def _prepare_ranks(self, losses: list[Tensor], windows: list[Window], last: bool) -> None:
        """Prepare a backward on several ranks. Check that they are in the same call, and train on other samples."""
        self._reduction.arm(last)  # the core's buckets can still be armed here
        self._pulse.phase = _WAITING
        if last and self._communicator.compares:
            several = f" of {len(losses)} losses" if len(losses) > 1 else ""
            names = " and ".join(window.name for window in windows)
            self._communicator.compare_calls(f"backward{several} for {names}")
        if last and self._first_steps.copies.pending and self.batches.micro_batch is None:
            self._first_steps.copies.compare(torch.stack([loss.detach() for loss in losses]))

    def _enter(self, window: Window, micro_batch: MicroBatch | None, weight: Weight | None, last: bool) -> None:
        """Check that a micro-batch belongs to the open window, and record its weight, or its losses' weights."""
        if micro_batch is not None and window.fresh:
            window.check_order(micro_batch)
        if not window.fresh or window.micro_batches > 0:
            if (weight is None) != (window.weight is None):
                raise UsageError("pass weight= to every backward of an accumulation window, or to none.")
            if window.weight is not None and window.weight.shape != getattr(weight, "shape", ()):
                raise UsageError("pass the same losses to every backward of an accumulation window.")
            if self._distributed and window.reduced and self._weights.unit == 1:
                # These gradients have been summed over the ranks, and will be summed again.
                self._finish(window)
                for same in by_device(self._guard.gradients(window.parameters)):
                    torch._foreach_mul_(same, 1 / self._communicator.world_size)
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
        if self._weights.unit == 1 or len(self._windows) == 1:
            window.check_gradients()

    def update(self, optimizer: Optimizer, scheduler: Any = None) -> StepResult:
        """See ``Strategy.update``."""
        if scheduler is not None:
            check_scheduler(scheduler)
        if not self.hooks.before_call:
            return self._update(optimizer, scheduler)
        with self.hooks.call("update"):
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
            self.expect_next(window)
            return _WITHIN_WINDOW
        if self._distributed:
            self._pulse.phase = _WAITING
        stepped, norm = self._average_and_step(window)
        window.clear()
        self._pulse.step += 1
        if self._scaler is not None:
            self._update_scale(self._scaler)
        if self._distributed:
            self._pulse.trained = self._pulse.trained[0] + 1, self.batches.position
            self._pulse.phase = USER_CODE
            self.expect_next(window)
        if stepped and scheduler is not None:
            self.step_scheduler(scheduler)
        self._end_windows()
        if stepped and norm is None:
            return _PLAIN_STEP
        return StepResult(stepped, norm, not stepped)

    def step_scheduler(self, scheduler: Any) -> None:
        """Step a scheduler after its optimizer."""
        if self._first_steps.schedulers.pending:
            self._first_steps.schedulers.look(scheduler)
        scheduler.step()

    def _average_and_step(self, window: Window) -> tuple[bool, Tensor | None]:
        """Finish averaging and make the step. Return whether the optimizer stepped, and the norm of the gradients."""
        if self._distributed:
            self._finish(window)
        gradients = self._guard.gradients(window.parameters)
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
        stepped, norm = self._step(window, gradients)
        if not stepped and norm is not None:
            assert self.spikes is not None
            if self.spikes.stops:
                self._clear_complete()
            self.spikes.act()
        elif not stepped and self.local is not None:
            self._nonfinite.record(window)
        elif not stepped and (self._scaler is None or self._scaler.get_scale() <= 1.0):
            self._not_finite(window)
        # else an overflow, which the GradScaler handles until its scale reaches 1
        return stepped, norm

    def _end_windows(self) -> None:
        """Run the actions that wait for the end of all open windows, and pass the boundary."""
        if self.local is not None and self.local.steps:
            if self.local.is_open:
                return
            self._average(self.local, ends=self.local.fragments == 1)
        if self._at_window_end and not self._windows.any_open:
            actions, self._at_window_end = self._at_window_end, []
            for action in actions:
                action()
        # With a loader, its next batch is the boundary. A single window has just ended, and needs no check.
        if self.batches.micro_batch is None and (len(self._windows) == 1 or not self._windows.any_open):
            for reached in self.hooks.at_boundary:
                reached()
            self._pass_boundary()

    def _step(self, window: Window, gradients: list[Tensor]) -> tuple[bool, Tensor | None]:
        """Let the optimizer step, with what happens around it."""
        for before in self.hooks.before_update:
            before(window.optimizer, window.parameters)
        stepped, norm = False, None
        try:
            if self._direct_steps is not None:
                self._direct_steps.allowed = True
            if self._distributed:  # reduced gradients show every rank's loss
                stepped, norm = self._guard(window.optimizer, window.parameters, gradients, ())
            elif window.loss_is_finite:
                # No NaN was added to a gradient: the guard checks the losses as well.
                stepped, norm = self._guard(window.optimizer, window.parameters, gradients, window.losses)
        except BaseException:
            self._windows.abandon(window)
            raise
        finally:
            if self._direct_steps is not None:
                self._direct_steps.allowed = False
        for after in self.hooks.after_update:
            after(window.optimizer, window.parameters, stepped)
        return stepped, norm

    def _finish(self, window: Window) -> None:
        if window.reduced:
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
        message = self._nonfinite.message(window, f"at step {self._pulse.step + 1}", distributed=self._distributed)
        if not self._nonfinite.skips(message):
            self._clear_complete()
            self._nonfinite.end(message)

    def _clear_complete(self) -> None:
        """Drop the gradients of all complete windows, since the run ends."""
        for window in self._windows:
            if window.complete:  # others share the loss
                window.clear()
        if self._scaler is not None:
            self._update_scale(self._scaler)


def _guard(communicator: Communicator, config: StrategyConfig, spikes: Spikes | None) -> GuardedStep:
    given = config.clip_norm, config.clip_value, config.grad_norm, None if spikes is None else spikes.found
    if communicator.shards_parameters:
        return ShardedGuardedStep(communicator, *given)
    return GuardedStep(communicator.device, *given)
