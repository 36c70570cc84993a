"""One optimizer step, exact in every mode: backward, reduce, unscale, clip, decide, step, zero — in this order.

The gradient that reaches the optimizer is that of the mean loss over all samples of the accumulation window on all
ranks. No gradient is scaled for that: backward is seeded with this rank's share of the window. Only where the shares
are unknown beforehand (``weight=``) is one scalar summed, overlapping the last backward, and the gradients are scaled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.errors import NonFiniteError, UsageError
from unitrain.sharding import MicroBatch
from unitrain.stopping import Stopped

if TYPE_CHECKING:
    from unitrain.strategy import Strategy

Weight = float | int | Tensor


class StepResult(NamedTuple):
    """What a step did. Its tensors stay on the device."""

    stepped: bool
    """Whether the optimizer moved; false within an accumulation window."""
    grad_norm: Tensor | None = None
    """2-norm of the whole gradient before clipping, where ``clip_norm`` is set; the same on all ranks."""
    skipped: bool = False
    """Whether the window was given up because a loss or a gradient was not finite."""


_WITHIN_WINDOW = StepResult(False)
_PLAIN_STEP = StepResult(True)


class _Window:
    """The accumulation window of one optimizer: what has been gathered since its last step."""

    __slots__ = (
        "complete", "finish", "fresh", "group_sizes", "late", "micro_batch", "micro_batches", "optimizer", "parameters",
        "reduced", "step", "total_wait", "trained", "weight",
    )  # fmt: skip

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters: list[Parameter] = []
        self.group_sizes: list[int] = []
        self.trained: list[Parameter] = []
        self.finish: Callable[[bool], None] | None = None
        self.clear()

    def clear(self) -> None:
        self.micro_batch: MicroBatch | None = None
        self.micro_batches = 0  # those that update() has closed
        self.fresh = True  # no backward yet for the micro-batch that is open
        self.step = -1
        self.complete = False  # the last backward ended the window
        self.reduced = False  # its gradients are being reduced, or have been
        self.late = False  # some of them can't have been reduced by an engine that must be armed before the forward
        self.weight: Tensor | None = None
        self.total_wait: Callable[[], None] | None = None


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
        self._world = strategy.world_size
        self._distributed = self._world > 1
        self._accumulate = config.accumulate
        self._clip_norm, self._clip_value = config.clip_norm, config.clip_value
        self._policy = config.on_nonfinite
        self._check_every = config.check_in_sync_every
        self._scaler = strategy.precision.scaler
        # An engine that averages divides by the world size; the seeds make up for it.
        self._unit = self._world if strategy.gradient_reduction == "mean" else 1
        self._windows: dict[Optimizer, _Window] = {}
        self._seeds: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}
        self._found = torch.zeros((), device=strategy.device)
        self._one = torch.ones((), device=strategy.device)
        self._loss_is_finite = True
        self._armed = True
        self._on_host = strategy.device.type == "cpu"
        self.micro_batch: MicroBatch | None = None
        self.steps = 0

    def register(self, optimizer: Optimizer) -> None:
        """Take note of an optimizer, so that a backward without one knows whose gradients it fills."""
        if optimizer not in self._windows:
            self._windows[optimizer] = _Window(optimizer)
            self._arm_counted(self._windows[optimizer])

    def hand_out(self, micro_batch: MicroBatch | None) -> None:
        """Take note of the micro-batch that a loader hands out for training, before its forward; None at the end."""
        self.micro_batch = micro_batch
        self._arm(micro_batch is None or micro_batch.last)

    def _arm(self, sync: bool) -> None:
        if self._distributed and sync != self._armed:
            self._armed = sync
            self._strategy._arm(sync)

    def _arm_counted(self, window: _Window) -> None:
        if self.micro_batch is None:
            self._arm(self._counted_last(window))

    # ------------------------------------------------------------------------------------------------- backward

    def backward(
        self, loss: Tensor, optimizer: Optimizer | None, *, sync: bool | None = None, weight: Weight | None = None
    ) -> None:
        """See ``Strategy.backward``."""
        windows = self._of(optimizer)
        micro_batch = self.micro_batch
        first = windows[0]
        if micro_batch is None:
            last = self._counted_last(first)
            share = self._unit / (self._world * self._accumulate)
        else:
            last = micro_batch.last
            share = micro_batch.count * self._unit / micro_batch.window
        if sync is not None:
            last = sync
        for window in windows:
            self._enter(window, micro_batch, weight, last)
        seed: Weight = share if weight is None else weight
        if self._distributed or self._accumulate > 1 or weight is not None or self._scaler is not None:
            seed_tensor = self._seed(loss, seed)
        elif self._on_host and not math.isfinite(loss.item()):
            self._loss_is_finite, seed_tensor = False, None
        else:
            seed_tensor = None
        inputs = first.trained if optimizer is not None and len(self._windows) > 1 else None
        loss.backward(seed_tensor, inputs=inputs)  # type: ignore[no-untyped-call]
        for window in windows:
            window.fresh = False
            window.complete = window.reduced = last

    def _of(self, optimizer: Optimizer | None) -> list[_Window]:
        if optimizer is None:
            if not self._windows:
                raise UsageError(
                    "backward() without an optimizer needs one that prepare() was given: pass it to either."
                )
            return [self._watched(window) for window in self._windows.values()]
        window = self._windows.get(optimizer)
        if window is None:
            self.register(optimizer)
            window = self._windows[optimizer]
        return [self._watched(window)]

    def _watched(self, window: _Window) -> _Window:
        """Bring the window's parameters up to date with its optimizer's groups."""
        groups = window.optimizer.param_groups
        sizes = [len(group["params"]) for group in groups]
        if sizes != window.group_sizes:
            window.group_sizes = sizes
            window.parameters = [p for group in groups for p in group["params"]]
            self._strategy.check_prepared(window.parameters)
            window.trained = [p for p in window.parameters if p.requires_grad]
            if self._distributed:
                window.finish = self._strategy._watch_gradients(window.trained)
        return window

    def _counted_last(self, window: _Window) -> bool:
        return window.micro_batches + 1 >= self._accumulate

    def _enter(self, window: _Window, micro_batch: MicroBatch | None, weight: Weight | None, last: bool) -> None:
        """Check that a micro-batch belongs to the window that is open, and note its weight."""
        if window.fresh and window.micro_batches == 0:
            window.step = -1 if micro_batch is None else micro_batch.step
        else:
            if (weight is None) != (window.weight is None):
                raise UsageError("pass weight= with every backward of an accumulation window, or with none.")
            if micro_batch is not None and micro_batch.step != window.step:
                raise UsageError(
                    f"the last micro-batch of step {window.step} of this epoch was never given to step(): every batch "
                    "that the loader hands out needs one (a loss times 0 leaves a batch out)."
                )
            if self._distributed and window.reduced and self._strategy.gradient_reduction == "sum":
                # What has been summed over the ranks is about to be summed again.
                self._finish(window)
                torch._foreach_mul_(_gradients(window.parameters), 1 / self._world)
        if last and (not window.fresh or not self._armed):
            window.late = True
        if weight is not None and window.fresh:
            total = torch.as_tensor(weight, dtype=torch.float64, device=self._strategy.device).detach()
            window.weight = total.clone() if window.weight is None else window.weight + total
            if last:
                self._sum_weights(window)

    def _sum_weights(self, window: _Window) -> None:
        if self._distributed and window.weight is not None and window.total_wait is None:
            window.total_wait = self._strategy._all_reduce(window.weight, "sum", "step.weight")

    def _seed(self, loss: Tensor, share: Weight) -> Tensor:
        """Return what backward starts from: this rank's share of the window, NaN where its loss is not finite.

        A NaN seed makes the reduced gradient NaN on every rank, so that all see it without a vote.
        """
        if isinstance(share, Tensor):
            seed = share.detach().to(loss.device, loss.dtype).reshape(loss.shape)
            seed = torch.where((seed == 0) | torch.isfinite(loss), seed, torch.nan)
        else:
            bad = False
            if share != 0 and self._on_host and not math.isfinite(loss.item()):
                self._loss_is_finite, bad = False, True
            key = (math.nan if bad else share, loss.dtype, loss.device)
            cached = self._seeds.get(key)
            if cached is None or bad:
                if len(self._seeds) > 64:
                    self._seeds.clear()
                cached = self._seeds[key] = torch.full_like(loss, key[0], requires_grad=False)
            seed = cached
            if not self._on_host and share != 0:
                seed = torch.where(torch.isfinite(loss), seed, torch.nan)
        return seed if self._scaler is None else self._scaler.scale(seed)

    # --------------------------------------------------------------------------------------------------- update

    def update(self, optimizer: Optimizer, scheduler: Any = None) -> StepResult:
        """See ``Strategy.update``."""
        window = self._windows.get(optimizer)
        if window is None or window.fresh:
            raise UsageError("update() needs a backward() before it.")
        window.micro_batches += 1
        if not window.complete:
            if window.micro_batch is not None and window.micro_batch is self.micro_batch:
                raise UsageError("step() was called twice for one micro-batch of an accumulation window.")
            window.micro_batch = self.micro_batch
            window.fresh = True
            self._arm_counted(window)
            return _WITHIN_WINDOW
        self._finish(window)
        gradients = _gradients(window.parameters)
        self._rescale(window, gradients)
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)
        if self._clip_value is not None and gradients:
            torch._foreach_clamp_max_(gradients, self._clip_value)
            torch._foreach_clamp_min_(gradients, -self._clip_value)
        norm = None
        if self._clip_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(window.parameters, self._clip_norm)
        if self._scaler is not None:
            stepped = self._scaled_step(window)
        else:
            stepped = self._loss_is_finite and self._gradients_are_finite(gradients, norm)
            if stepped:
                optimizer.step()
            else:
                self._not_finite(window)
        for p in window.parameters:
            p.grad = None
        window.clear()
        self.steps += 1
        self._loss_is_finite = True
        self._arm_counted(window)
        if self._check_every and self.steps % self._check_every == 0:
            self._strategy.check_all_in_sync()
        if stepped and scheduler is not None:
            scheduler.step()
        if stepped and norm is None:
            return _PLAIN_STEP
        return StepResult(stepped, norm, not stepped)

    def _finish(self, window: _Window) -> None:
        if window.finish is not None and window.reduced:
            window.finish(window.late)
            window.reduced = window.late = False

    def _rescale(self, window: _Window, gradients: list[Tensor]) -> None:
        if window.weight is not None:
            self._sum_weights(window)
            if window.total_wait is not None:
                window.total_wait()
            factor = self._unit / window.weight
            factor = torch.where(torch.isfinite(factor), factor, 0.0)  # weights of 0 everywhere: gradients are 0 too
            for gradient in gradients:
                gradient.mul_(factor.to(gradient.dtype))
        elif window.step < 0 and window.micro_batches != self._accumulate:
            # A window that sync=True ended early: each seed was one part of `accumulate`.
            torch._foreach_mul_(gradients, self._accumulate / window.micro_batches)

    def _gradients_are_finite(self, gradients: list[Tensor], norm: Tensor | None) -> bool:
        if norm is not None:
            return math.isfinite(norm.item())
        if not gradients:
            return True
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found.zero_(), self._one)
        return not self._found.item()

    def _scaled_step(self, window: _Window) -> bool:
        """Step in fp16. An overflow is the loss scale's business, until the scale has nothing left to give."""
        assert self._scaler is not None
        before = self._scaler.get_scale()
        self._scaler.step(window.optimizer)
        self._scaler.update()
        stepped = self._scaler.get_scale() >= before
        if not stepped and before <= 1.0:
            self._not_finite(window)
        return stepped

    def _not_finite(self, window: _Window) -> None:
        """Say once who was not finite, and do what ``on_nonfinite`` says. Every rank gets here at the same step."""
        ranks = [
            rank for rank, finite in enumerate(self._strategy.all_gather_object(self._loss_is_finite)) if not finite
        ]
        bad = next((p for p in window.parameters if p.grad is not None and not p.grad.isfinite().all()), None)
        where = (
            f"the loss of rank {', '.join(map(str, ranks))}" if ranks else "a gradient (every rank's loss was finite)"
        )
        first = "" if bad is None else f"; first bad parameter: {self._strategy.parameter_name(bad)}"
        message = f"not finite at step {self.steps + 1}: {where}{first}."
        for p in window.parameters:
            p.grad = None
        window.clear()
        self._loss_is_finite = True
        if self._policy == "skip":
            self._strategy.print(f"unitrain: {message} The step was skipped on all ranks.")
            return
        advice = "The weights are those of the step before. Set on_nonfinite to skip to leave such steps out."
        if self._policy == "raise":
            raise NonFiniteError(f"{message} {advice}")
        self._strategy.print(f"unitrain: stopped: {message} {advice}")
        raise Stopped(NonFiniteError.exit_code)


def _gradients(parameters: Iterable[Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]
