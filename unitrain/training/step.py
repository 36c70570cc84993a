"""One optimizer step, exact in every mode: backward, reduce, unscale, clip, decide, step, zero — in this order.

The gradient that reaches the optimizer is that of the mean loss over all samples of the accumulation window on all
ranks. No gradient is scaled for that: backward is seeded with this rank's share of the window. Only where the shares
are unknown beforehand (``weight=``) is one scalar summed, overlapping the last backward, and the gradients are scaled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.data.sharding import MicroBatch
from unitrain.errors import NonFiniteError, UsageError
from unitrain.job.pulse import OWN_CODE
from unitrain.job.stopping import Stopped
from unitrain.training.copies import CopyCheck
from unitrain.training.foreign_steps import ForeignSteps
from unitrain.training.guard import GuardedStep
from unitrain.training.nonfinite import LocalGradients, describe
from unitrain.training.window import Window

if TYPE_CHECKING:
    from unitrain.strategy import Strategy

Weight = float | int | Tensor


class StepResult(NamedTuple):
    """What a step did. Its tensors stay on the device."""

    stepped: bool
    """Whether the optimizer moved; false within an accumulation window."""
    grad_norm: Tensor | None = None
    """2-norm of the gradient before it was clipped to ``clip_norm``, where that is set; the same on all ranks."""
    skipped: bool = False
    """Whether the window was given up because a loss or a gradient was not finite."""


_WAITING = "step"  # the phase in which gradients are averaged
_WITHIN_WINDOW = StepResult(False)
_PLAIN_STEP = StepResult(True)


class TrainingStep:
    """``step``, ``backward`` and ``update`` of a strategy.

    Args:
        strategy: what communicates.

    Attributes:
        micro_batch: what the loader that is iterated for training has handed out last; None without one.
    """

    def __init__(self, strategy: Strategy) -> None:
        config = strategy.config
        self._strategy = strategy
        self._pulse = strategy.pulse
        self._world = strategy.world_size
        self._distributed = self._world > 1
        self._accumulate = config.accumulate
        self._policy = config.on_nonfinite
        self._check_every = config.check_in_sync_every
        self._debug = config.debug
        self._scaler = strategy.precision.scaler
        # An engine that averages divides by the world size; the seeds make up for it.
        self._unit = self._world if strategy.gradient_reduction == "mean" else 1
        self._windows: dict[Optimizer, Window] = {}
        self._finishers: dict[Parameter, Callable[[bool], None]] = {}
        self._seeds: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}
        self._on_host = strategy.device.type == "cpu"
        self._guarded_step = GuardedStep(strategy.device, config.clip_norm, config.clip_value)
        self._copies = CopyCheck(strategy)
        self._foreign_steps = ForeignSteps(strategy.is_prepared) if self._distributed else None
        self._unscaled = False
        self._armed = True
        self.micro_batch: MicroBatch | None = None
        self.steps: int = 0
        self._at_window_end: list[Callable[[], None]] = []

    def register(self, optimizer: Optimizer) -> None:
        """Take note of an optimizer, so that a backward without one knows whose gradients it fills."""
        if optimizer not in self._windows:
            if not isinstance(optimizer, Optimizer):
                raise UsageError(f"step() and backward() take optimizers of torch, not {type(optimizer).__name__}.")
            local = LocalGradients(all_of_them=self._debug)
            self._windows[optimizer] = Window(optimizer, f"optimizer {len(self._windows)}", local)
            self._arm_counted(self._windows[optimizer])

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        if self._foreign_steps is not None:
            self._foreign_steps.close()
        for window in self._windows.values():
            window.local_gradients.close()

    @property
    def within_window(self) -> bool:
        """Whether some optimizer has gradients that wait for the rest of their window."""
        return any(window.micro_batches > 0 or not window.fresh for window in self._windows.values())

    def at_window_end(self, action: Callable[[], None]) -> None:
        """Run ``action`` once, after the step that ends the windows that are open."""
        self._at_window_end.append(action)

    def hand_out(self, micro_batch: MicroBatch | None) -> None:
        """Take note of the micro-batch that a loader hands out for training, before its forward; None at the end."""
        self.micro_batch = micro_batch
        self._arm(micro_batch is None or micro_batch.last)

    def _arm(self, sync: bool) -> None:
        if self._distributed and sync != self._armed:
            self._armed = sync
            self._strategy._arm(sync)

    def _arm_counted(self, window: Window) -> None:
        if self._distributed and self.micro_batch is None:
            self._arm(self._counted_last(window))

    # ------------------------------------------------------------------------------------------------- backward

    def backward(
        self,
        loss: Tensor,
        optimizers: Sequence[Optimizer] | None,
        *,
        sync: bool | None = None,
        weight: Weight | None = None,
    ) -> None:
        """See ``Strategy.backward``; None stands for all prepared optimizers."""
        if self._strategy.closed:
            raise UsageError("the strategy is closed: train before close().")
        loss = _checked(loss)
        windows = self._of(optimizers)
        micro_batch = self.micro_batch
        if micro_batch is None:
            last = self._counted_last(windows[0])
            share = self._unit / (self._world * self._accumulate)
        else:
            last = micro_batch.last
            share = micro_batch.count * self._unit / micro_batch.window
        if sync is not None:
            if sync and not last and micro_batch is not None:
                raise UsageError(
                    "sync=True can't end a window that a loader cut: it ends with its own last micro-batch."
                )
            last = sync
        for window in windows:
            self._enter(window, micro_batch, weight, last)
        self._arm(last)  # buckets of our own can be armed as late as this
        seed: Weight = share if weight is None else weight
        weighs = _weighs(seed)
        finite = not weighs or self._looks_finite(loss, windows)
        if self._distributed:
            self._pulse.phase = _WAITING
            if last:
                self._look_at_the_ranks(loss, windows)
        seed_tensor = None
        if self._distributed or self._accumulate > 1 or weight is not None or self._scaler is not None:
            seed_tensor = self._seed(loss, seed)
        inputs = None
        if len(windows) < len(self._windows):
            inputs = [p for window in windows for p in window.trained]
        try:
            if weighs and finite:
                loss.backward(seed_tensor, inputs=inputs)  # type: ignore[no-untyped-call]
            else:
                self._backward_filled(loss, seed_tensor, inputs, windows, math.nan if weighs else 0.0)
        except RuntimeError as error:
            _refuse_a_second_backward(error)
            raise
        for window in windows:
            window.fresh = False
            window.complete = window.reduced = last
        if self._distributed:
            self._pulse.phase = OWN_CODE

    def _look_at_the_ranks(self, loss: Tensor, windows: list[Window]) -> None:
        """Look whether the ranks are about to average what belongs together."""
        if self._debug:
            self._strategy._compare_calls(f"backward for {' and '.join(window.name for window in windows)}")
        if self._copies.pending and self.micro_batch is None:
            self._copies.look(loss)

    def _looks_finite(self, loss: Tensor, windows: list[Window]) -> bool:
        """Note whether a loss is finite. On a GPU that would have to be waited for: the seed there sees to it."""
        if self._on_host:
            finite = math.isfinite(loss.item())
            for window in windows:
                window.loss_is_finite &= finite
            return finite
        for window in windows:
            window.losses.append(loss.detach())
        return True

    def _backward_filled(
        self, loss: Tensor, seed: Tensor | None, inputs: list[Parameter] | None, windows: list[Window], fill: float
    ) -> None:
        """Run backward, for its collectives, and make every gradient that it yields ``fill``.

        NaN, where the loss is not finite: the *reduced* gradient then tells all ranks, without a vote. A loss alone may
        not (that of labels which are all ignored is NaN, its gradient 0). 0, where the batch does not count: no
        product with its NaN loss may spoil what the others have to say.
        """
        make = partial(torch.full_like, fill_value=fill)
        parameters = [p for window in windows for p in window.parameters if p.requires_grad]
        with ExitStack() as stack:
            for window in windows:
                stack.enter_context(window.local_gradients.ignored())
            for p in parameters:
                stack.enter_context(p.register_hook(make))  # type: ignore[no-untyped-call]
            loss.backward(seed, inputs=inputs)  # type: ignore[no-untyped-call]

    def _of(self, optimizers: Sequence[Optimizer] | None) -> list[Window]:
        if optimizers is None:
            if not self._windows:
                raise UsageError(
                    "backward() without an optimizer needs one that prepare() was given: pass it to either."
                )
            return [self._watched(window) for window in self._windows.values()]
        for optimizer in optimizers:
            self.register(optimizer)
        return [self._watched(self._windows[optimizer]) for optimizer in optimizers]

    def _watched(self, window: Window) -> Window:
        """Bring the window's parameters up to date with its optimizer's groups, and with what is frozen.

        One optimizer in one process need not know of what is frozen: it has no gradient.
        """
        if not self._distributed and len(self._windows) == 1 and len(window.optimizer.param_groups) == window.groups:
            return window
        trained = [p for group in window.optimizer.param_groups for p in group["params"] if p.requires_grad]
        if len(trained) != len(window.trained) or not all(map(is_, trained, window.trained)):
            self._watch(window, trained)
        return window

    def _watch(self, window: Window, trained: list[Parameter]) -> None:
        window.groups = len(window.optimizer.param_groups)
        window.parameters = [p for group in window.optimizer.param_groups for p in group["params"]]
        self._strategy.check_prepared(window.parameters)
        known = set(map(id, window.trained))
        for p in trained:
            if id(p) not in known:
                p.grad = None  # what a backward for another optimizer has left there
        window.trained = trained
        if self._distributed:
            window.local_gradients.watch(trained)
            new = [p for p in trained if p not in self._finishers]
            if new:
                self._finishers.update(dict.fromkeys(new, self._strategy._watch_gradients(new)))
            window.finishers = list(dict.fromkeys(self._finishers[p] for p in trained))

    def _counted_last(self, window: Window) -> bool:
        return window.micro_batches + 1 >= self._accumulate

    def _enter(self, window: Window, micro_batch: MicroBatch | None, weight: Weight | None, last: bool) -> None:
        """Check that a micro-batch belongs to the window that is open, and note its weight."""
        if micro_batch is not None and window.fresh:
            self._check_order(window, micro_batch)
        if not window.fresh or window.micro_batches > 0:
            if (weight is None) != (window.weight is None):
                raise UsageError("pass weight= with every backward of an accumulation window, or with none.")
            if self._distributed and window.reduced and self._strategy.gradient_reduction == "sum":
                # What has been summed over the ranks is about to be summed again.
                self._finish(window)
                torch._foreach_mul_(_gradients(window.parameters), 1 / self._world)
        window.micro_batch = micro_batch
        # Counted windows of several optimizers end at different times: a forward may have seen another's arming.
        crossing = micro_batch is None and self._accumulate > 1 and len(self._windows) > 1
        if last and (crossing or not window.fresh or not self._armed):
            window.late = True
        if weight is not None and window.fresh:
            total = torch.as_tensor(weight, dtype=torch.float64, device=self._strategy.device).detach()
            window.weight = total.clone() if window.weight is None else window.weight + total
            if last:
                self._sum_weights(window)

    def _check_order(self, window: Window, micro_batch: MicroBatch) -> None:
        """Raise where a micro-batch does not follow the one before."""
        before = window.micro_batch
        if before is micro_batch:
            raise UsageError("step() was called twice for one micro-batch of an accumulation window.")
        if window.micro_batches > 0 and micro_batch.opening:
            window.clear()  # the iteration before was broken off within a window
            before = None
        follows = micro_batch.first if before is None else micro_batch.start == before.stop
        if not follows or (before is None and window.micro_batches > 0):
            raise UsageError(
                f"a micro-batch before this one, of step {micro_batch.step} of the epoch, was never given to step(): "
                "every batch that the loader hands out needs one (a loss times 0 leaves a batch out)."
            )

    def _sum_weights(self, window: Window) -> None:
        if self._distributed and window.weight is not None and window.total_wait is None:
            window.total_wait = self._strategy._all_reduce(window.weight, "sum", f"weight of {window.name}")

    def _seed(self, loss: Tensor, share: Weight) -> Tensor:
        """Return what backward starts from: this rank's share of the window; on a GPU, NaN for a NaN loss."""
        if isinstance(share, Tensor):
            seed = share.detach().to(loss.device, loss.dtype).reshape(())
        else:
            key = (share, loss.dtype, loss.device)
            cached = self._seeds.get(key)
            if cached is None:
                if len(self._seeds) > 64:
                    self._seeds.clear()
                cached = self._seeds[key] = torch.full_like(loss, share, requires_grad=False)
            seed = cached
        if not self._on_host:
            seed = torch.where((seed == 0) | torch.isfinite(loss), seed, torch.nan)
        return seed if self._scaler is None else self._scaler.scale(seed)

    # --------------------------------------------------------------------------------------------------- update

    def update(self, optimizer: Optimizer, scheduler: Any = None) -> StepResult:
        """See ``Strategy.update``."""
        window = self._windows.get(optimizer)
        if window is None or window.fresh:
            raise UsageError("update() needs a backward() before it.")
        window.micro_batches += 1
        if not window.complete:
            window.fresh = True
            self._arm_counted(window)
            return _WITHIN_WINDOW
        if self._distributed:
            self._pulse.phase = _WAITING
        self._finish(window)
        gradients = _gradients(window.parameters)
        self._rescale(window, gradients)
        if self._scaler is not None and gradients:
            self._scaler.unscale_(optimizer)
            self._unscaled = True
        stepped, norm = False, None
        if self._distributed or window.loss_is_finite:  # reduced gradients know of every rank's loss
            stepped, norm = self._step(window, gradients)
        if not stepped and (self._scaler is None or self._scaler.get_scale() <= 1.0):
            self._not_finite(window)
        # else an overflow, which is the loss scale's business until the scale has nothing left to give
        if self._distributed:
            self._pulse.phase = OWN_CODE
        window.clear()
        self.steps += 1
        self._update_scale()
        self._arm_counted(window)
        if self._check_every and self.steps % self._check_every == 0:
            self._strategy.check_all_in_sync()
        if stepped and scheduler is not None:
            scheduler.step()
        if self._at_window_end and not self.within_window:
            actions, self._at_window_end = self._at_window_end, []
            for action in actions:
                action()
        # With a loader its next batch is the boundary. The check of one window would be one for nothing: it has ended.
        if self.micro_batch is None and (len(self._windows) == 1 or not self.within_window):
            self._strategy.stopping.pass_boundary()
        if stepped and norm is None:
            return _PLAIN_STEP
        return StepResult(stepped, norm, not stepped)

    def _step(self, window: Window, gradients: list[Tensor]) -> tuple[bool, Tensor | None]:
        if self._foreign_steps is None:
            return self._guarded_step(window.optimizer, window.parameters, gradients)
        self._foreign_steps.own = True
        try:
            return self._guarded_step(window.optimizer, window.parameters, gradients)
        finally:
            self._foreign_steps.own = False

    def _finish(self, window: Window) -> None:
        if window.reduced:
            for finish in window.finishers:
                finish(window.late)
            window.reduced = window.late = False

    def _rescale(self, window: Window, gradients: list[Tensor]) -> None:
        if window.weight is not None:
            self._sum_weights(window)
            if window.total_wait is not None:
                window.total_wait()
            factor = self._unit / window.weight
            factor = torch.where(torch.isfinite(factor), factor, 0.0)  # weights of 0 everywhere: gradients are 0 too
            for gradient in gradients:
                gradient.mul_(factor.to(gradient.dtype))
        elif window.micro_batch is None and window.micro_batches != self._accumulate:
            # A window that sync=True ended early: each seed was one part of `accumulate`.
            torch._foreach_mul_(gradients, self._accumulate / window.micro_batches)

    def _update_scale(self) -> None:
        """Adapt the loss scale, but not while gradients made with the present one wait for their update."""
        if self._scaler is None or not self._unscaled:
            return
        if not self.within_window:
            self._scaler.update()
            self._unscaled = False

    def _not_finite(self, window: Window) -> None:
        """Say once who was not finite, and do what ``on_nonfinite`` says. Every rank gets here at the same step."""
        found = describe(
            self._strategy,
            window.parameters,
            losses=window.loss_is_finite and all(bool(loss.isfinite()) for loss in window.losses),
            gradients=self._distributed and window.local_gradients.are_finite(),
        )
        message = f"not finite at step {self.steps + 1}: {found}."
        if self._policy == "skip":
            self._strategy.print(f"unitrain: {message} The step was skipped on all ranks.")
            return
        for one in self._windows.values():
            if one.complete:  # others that shared the loss
                one.clear()
        self._update_scale()
        advice = "The weights are those of the step before. Set on_nonfinite to skip to leave such steps out."
        if self._policy == "raise":
            raise NonFiniteError(f"{message} {advice}")
        self._strategy.print(f"unitrain: stopped: {message} {advice}")
        raise Stopped(NonFiniteError.exit_code)


def _checked(loss: Tensor) -> Tensor:
    """Return a loss as a tensor without dimensions, or say what is wrong with it."""
    if not isinstance(loss, Tensor):
        raise UsageError(f"a loss is a tensor, not {type(loss).__name__}: give step() what the criterion returned.")
    if loss.numel() != 1:
        raise UsageError(f"a loss is one number, but this has shape {tuple(loss.shape)}: take its mean().")
    if not loss.requires_grad:
        raise UsageError(
            "the loss has no gradient: it was detached, or computed under no_grad() or from frozen weights."
        )
    return loss.reshape(()) if loss.dim() else loss


def _refuse_a_second_backward(error: RuntimeError) -> None:
    if "backward through the graph a second time" in str(error):
        raise UsageError(
            "this loss has been through a backward already, and step() does one itself: leave yours out. Losses that "
            "share a part of the model are added, and given to step() together."
        ) from error


def _weighs(share: Weight) -> bool:
    """Whether a loss counts at all; a tensor on a GPU is taken to, as asking would wait for it."""
    return bool(share != 0) if not isinstance(share, Tensor) or share.device.type == "cpu" else True


def _gradients(parameters: Iterable[Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]
