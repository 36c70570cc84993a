"""The optimizer step. Its order stands in ``_backward`` and ``_update``, which follow one another on one page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from unitrain.pulse import USER_CODE
from unitrain.training.gradients.guard import GuardedStep
from unitrain.training.gradients.sharded_guard import guard_for
from unitrain.training.hooks import Hooks
from unitrain.training.loop.averaging import Averaging, Replicas
from unitrain.training.loop.backward import Backward
from unitrain.training.loop.batches import OpenBatches
from unitrain.training.loop.checks import ScriptChecks
from unitrain.training.loop.judge import Judge, NonFinitePolicy
from unitrain.training.loop.script_gradients import ScriptGradients
from unitrain.training.loop.sockets import Sockets
from unitrain.training.models.supported import check_scheduler, explain
from unitrain.training.windows.weights import Losses, LossScale, ScriptLosses, ScriptWeights, Weights
from unitrain.training.windows.window import Window
from unitrain.training.windows.windows import Windows


class StepResult(NamedTuple):
    """Result of a step. Its tensors stay on the device."""

    stepped: bool
    """Whether the optimizer made a step; False within an accumulation window."""
    grad_norm: Tensor | None = None
    """2-norm of the gradients before clipping, with ``clip_norm``; the same on all ranks."""
    skipped: bool = False
    """Whether the step was skipped: a loss or a gradient was non-finite, or a feature forbids such a step."""


_WITHIN_WINDOW = StepResult(False)
_PLAIN_STEP = StepResult(True)


class TrainingStep:
    """Implements ``step``, ``backward`` and ``update`` of a strategy, and counts the steps.

    Args:
        sockets: the parts of a run, and what features have plugged in.
        scaler: scales losses under fp16.

    A step is made by the script's thread, on all ranks in the same order: whatever is collective in it waits for them.

    Attributes:
        hooks: are notified around a step.
        batches: the batches that loaders have yielded.
        averaging: averages gradients.
        replicas: whether the ranks have one model.
        windows: the accumulation window of each optimizer.
        checks: look at the script's calls.
        scale: of losses, under fp16.
        guard: clips the gradients, and makes the optimizer's step.
        judge: deals with steps that are not made.
        window_end_actions: what ``at_window_end`` was passed, and has not been called yet.
    """

    def __init__(self, sockets: Sockets, scaler: torch.amp.GradScaler | None) -> None:
        ranks, backend, config = sockets.communicator, sockets.backend, sockets.config
        self._pulse, self._accumulate = ranks.collectives.pulse, config.accumulate
        self._stopping = sockets.stopping
        self.window_end_actions: list[Callable[[], None]] = []
        self.hooks: Hooks = sockets.hooks
        self.batches: OpenBatches = sockets.batches
        self.averaging: Averaging = sockets.averaging
        self.replicas: Replicas = sockets.replicas
        self.checks: ScriptChecks = ScriptChecks(ranks, config.accumulate, sockets.prepared.has)
        self.scale: LossScale = LossScale(scaler)
        self._weights = Weights(ranks, sockets.readers.world_size, config.accumulate, self.averaging.unit)
        self._autograd = Backward(self._weights, self.scale, ranks.device)
        nonfinite = NonFinitePolicy(ranks, sockets.prepared, config.on_nonfinite)
        self.judge: Judge = Judge(sockets.verdicts, nonfinite, self.scale)
        self.guard: GuardedStep = guard_for(ranks, config.clip_norm, self.judge.forbids)
        self.check_verdicts()
        self.windows: Windows = Windows(
            ranks,
            backend,
            sockets.prepared,
            self.hooks,
            self._weights.total,
            averaged=self.averaging.in_step,
            moves_gradients=self.averaging.unit > 1,
            all_gradients=config.debug,
            complete=self.averaging.complete,
            take=ScriptGradients(sockets).take,
        )
        for hook in filter(None, (self.averaging, self.guard, self.checks.direct, self.checks)):
            self.hooks.add_hook(hook)

    # ------------------------------------------------------------------------------- the order of a step, on one page

    def _backward(self, loss: ScriptLosses, windows: list[Window], weight: ScriptWeights, batch: Any) -> None:
        """Run the first half of a step, for each micro-batch."""
        losses = Losses(loss, weight, batch)
        if self._pulse.step >= self.checks.next_look:
            self.checks.before_backward(losses, None if losses.batches else self.batches.micro_batch)
        micro_batch = self.batches.of_backward(losses) if self.batches.used or losses.batches else None
        last = windows[0].micro_batches + 1 >= self._accumulate if micro_batch is None else micro_batch.last
        given = self._weights.given(losses, micro_batch) if losses.weights else None
        for window in windows:
            window.enter(micro_batch, given, last)
        if self.averaging.in_step:
            self.averaging.begin(losses, windows, last)
        # weigh, backward
        self._autograd.run(losses, micro_batch, windows, last, len(windows) == self.windows.count)
        if self.averaging.in_step:
            self.averaging.end(windows, last)
        for window in windows:
            window.leave(last)

    def _update(self, window: Window, optimizer: Optimizer, scheduler: Any) -> StepResult:
        """Run the second half, which makes a step at the end of an accumulation window."""
        if not window.last:
            return self._within_window(window)
        if window.shared.rivals:
            self.windows.separate_for_update(window)
        if self.averaging.in_step:
            self.averaging.finish(window)  # average
        gradients = self.guard.gradients(window.parameters)
        if not gradients or window.total.weight is not None or self.scale.scaler is not None:
            self._unscale(optimizer, window, gradients)  # unscale
        stepped, norm = self._judge_clip_and_step(optimizer, window, gradients)  # judge, clip, update
        window.clear()
        self._pulse.step += 1  # count, whether or not weights have changed: every rank has come as far
        if self.averaging.in_step or self.scale.scaler is not None:
            self._follow(window)
        if stepped and scheduler is not None:
            self.step_scheduler(scheduler)
        if self.replicas.differ or self.window_end_actions or self.hooks.at_boundary:
            self._end_step()  # boundary
        elif self.batches.micro_batch is None and (self.windows.count == 1 or not self.windows.any_open):
            self._pulse.boundary += 1  # the same, without a call
            if self._stopping.boundaries.held:
                self._stopping.stop_if_due()
        return _PLAIN_STEP if stepped and norm is None else StepResult(stepped, norm, not stepped)

    # --------------------------------------------------------------------------------------------------- its callers

    def step(
        self, loss: ScriptLosses, optimizer: Optimizer, scheduler: Any, weight: ScriptWeights, batch: Any
    ) -> StepResult:
        """Run both halves for one optimizer. See ``Strategy.step``.

        Raises:
            UsageError: the loss can't be trained on, or the call is not one that the loader's batches allow.
            NonFiniteError: a loss or gradient is non-finite, and ``on_nonfinite`` is raise.
            Stopped: the run ends at this step.
        """
        if self.hooks.before_call:
            self.backward(loss, (optimizer,), weight, batch)
            return self.update(optimizer, scheduler)
        windows = self.windows.of((optimizer,))
        self._backward(loss, windows, weight, batch)
        return self._update(windows[0], optimizer, scheduler)

    def backward(
        self, loss: ScriptLosses, optimizers: Sequence[Optimizer] | None, weight: ScriptWeights, batch: Any
    ) -> None:
        """Run the first half. See ``Strategy.backward``. None means all prepared optimizers."""
        with self.hooks.call("backward"):
            self._backward(loss, self.windows.of(optimizers), weight, batch)

    def update(self, optimizer: Optimizer, scheduler: Any = None) -> StepResult:
        """Run the second half, with the hooks of a call around it. See ``Strategy.update``."""
        if scheduler is not None:
            check_scheduler(scheduler)
        with self.hooks.call("update"):
            return self._update(self.windows.of_update(optimizer), optimizer, scheduler)

    # ----------------------------------------------------------------------------------------------------- its parts

    def _within_window(self, window: Window) -> StepResult:
        """Complete a micro-batch that does not end the window."""
        window.advance()
        self.expect_next(window)
        return _WITHIN_WINDOW

    def _unscale(self, optimizer: Optimizer, window: Window, gradients: list[Tensor]) -> None:
        """Divide gradients by the total weight of their window, and by the loss scale, as far as there is one."""
        if not gradients:
            self.checks.no_gradients(window.name)
        if window.total.weight is not None:
            window.rescale(gradients)
        if self.scale.scaler is not None:
            self.scale.unscale(optimizer, gradients)

    def _judge_clip_and_step(
        self, optimizer: Optimizer, window: Window, gradients: list[Tensor]
    ) -> tuple[bool, Tensor | None]:
        """Run the hooks, the guard and ``optimizer.step()``, or continue without. A GPU may judge later than the host.

        Returns:
            Whether the optimizer stepped, and the norm of the gradients if it is computed and finite.
        """
        parameters, evidence = window.parameters, window.evidence
        stepped, norm = False, None
        try:
            for begin in self.hooks.before_update:
                begin(optimizer, parameters)
            if self.averaging.in_step:  # averaged gradients show every rank's loss
                stepped, norm = self.guard.step(optimizer, parameters, gradients, ())
            elif evidence.loss_is_finite:
                # No NaN was added to a gradient: the guard checks the losses as well.
                stepped, norm = self.guard.step(optimizer, parameters, gradients, evidence.losses)
            for end in self.hooks.after_update:
                end(optimizer, parameters, stepped)
        except BaseException as error:
            for failed in self.hooks.after_error:
                failed(optimizer)
            explain(error, optimizer)
            raise
        if not stepped:
            self._go_on_without(window, norm)
        return stepped, norm

    def _go_on_without(self, window: Window, norm: Tensor | None) -> None:
        """Continue without the step, or end the run, without the gradients of all complete windows."""
        try:
            self.judge.not_made(window, norm, self._pulse.step + 1)
        except BaseException:
            for complete in self.windows:
                if complete.last:  # they share the loss
                    complete.clear()
            self._update_scale()
            raise

    def _follow(self, window: Window) -> None:
        """Tell the loss scale, the watch and the backend of the step."""
        if self.scale.scaler is not None:
            self._update_scale()
        if self.averaging.in_step:
            self._pulse.trained = self._pulse.trained[0] + 1, self.batches.position
            self._pulse.phase = USER_CODE
            self.expect_next(window)

    def _update_scale(self) -> None:
        """Update the loss scale, unless gradients computed with the current one wait for their update."""
        if not self.windows.any_open:
            self.scale.update()

    def step_scheduler(self, scheduler: Any) -> None:
        """Step a scheduler after its optimizer."""
        if self.checks.schedulers.pending:
            self.checks.schedulers.look(scheduler)
        scheduler.step()

    def _end_step(self) -> None:
        """If the ranks have one model, run the actions that wait for the end of all windows, and pass the boundary."""
        if self.replicas.differ and not self.replicas.end_step():
            return
        if self.window_end_actions and not self.windows.any_open:
            actions, self.window_end_actions = self.window_end_actions, []
            for action in actions:
                action()
        # With a loader, its next batch is the boundary. A single window has just ended, and needs no check.
        if self.batches.micro_batch is None and (self.windows.count == 1 or not self.windows.any_open):
            for reached in self.hooks.at_boundary:
                reached()
            self._stopping.pass_boundary()  # raises if the run is to be stopped

    # ------------------------------------------------------------------------------------------- what others ask for

    @property
    def global_step(self) -> int:
        """Number of optimizer steps of the run so far, including those before it was resumed."""
        return self._pulse.step

    @global_step.setter
    def global_step(self, number: int) -> None:
        self._pulse.step = number

    @property
    def within_window(self) -> bool:
        """Whether an optimizer has gradients of an accumulation window that is not complete, or models differ."""
        return self.windows.any_open or self.replicas.is_open

    def at_window_end(self, action: Callable[[], None]) -> None:
        """Call ``action`` once, after the step that ends all open windows, when the ranks have one model.

        Args:
            action: called by the main thread, before the boundary is passed. It may be collective.
        """
        self.window_end_actions.append(action)

    def expect_next(self, window: Window | None = None) -> None:
        """Prepare for a forward and backward that end a window, or don't, as far as that is known.

        Without a loader, the micro-batches of ``window`` are counted.
        """
        if self.averaging.in_step:
            following = self.batches.following
            if following is not None:
                self.averaging.expect(following.last)
            elif window is not None and self.batches.micro_batch is None:
                self.averaging.expect(window.micro_batches + 1 >= self._accumulate)

    def end_epoch(self) -> None:
        """Give all ranks one model. Collective."""
        if self.replicas.end_epoch():
            self._end_step()

    def end(self) -> None:
        """Tell the hooks that the run ends, and warn if the script has left out a batch."""
        for ended in self.hooks.at_end:
            ended()
        self.checks.check_batches(self.batches)

    def check_verdicts(self) -> None:
        """Follow a change of the verdicts: compute the norm of the gradients in each step if one needs it."""
        self.guard.measure(for_verdicts=self.judge.reads_norms)

    def close(self) -> None:
        """Remove the hooks of parameters and optimizers."""
        self.checks.close()
        self.windows.close()
        self.averaging.close()
