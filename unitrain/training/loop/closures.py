"""Steps of optimizers that evaluate a closure several times: LBFGS, sharpness-aware minimisation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from unitrain.errors import NonFiniteError, UsageError
from unitrain.training.loop.script_gradients import check_settings
from unitrain.training.loop.sockets import Sockets
from unitrain.training.loop.step import StepResult, TrainingStep
from unitrain.training.models.in_sync import compare_tensors
from unitrain.training.windows.window import Window


class Closures:
    """Has optimizers evaluate a closure of the script, each time with averaged, checked and clipped gradients.

    Args:
        sockets: the parts of the run.
        step: makes the steps.
    """

    def __init__(self, sockets: Sockets, step: TrainingStep) -> None:
        self._config, self._ranks, self._step = sockets.config, sockets.communicator, step

    def update(self, optimizer: Optimizer, scheduler: Any, closure: Callable[[], Any]) -> StepResult:
        """Make a step with a closure, which is passed to ``optimizer.step()``. Collective.

        If the optimizer has no gradients yet, the closure is evaluated before, since hooks and the guard judge a step
        by its first gradients.

        Raises:
            UsageError: the settings don't allow closures, or the optimizer no shards.
        """
        check_settings(self._config, "update() was passed a closure")
        if self._ranks.sharding.of_optimizers:
            raise UsageError(
                "a closure needs an optimizer of all parameters, and this run shards optimizers over the ranks: turn "
                "that off, or use an optimizer without a closure."
            )
        window = self._step.windows.register(optimizer)
        if window.last is None and all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
            self._evaluate(closure)
        # Once: a step() may call that of its base class without a closure.
        closures = [partial(self._reevaluate, window, closure)]

        def pass_closure(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            return ((optimizer, closures.pop()), kwargs) if closures else None

        hook = optimizer.register_step_pre_hook(pass_closure)
        try:
            return self._step.update(optimizer, scheduler)
        finally:
            hook.remove()
            window.clear()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Call a closure, and return its loss, which must be the same on all ranks. Collective."""
        with torch.enable_grad():
            loss = closure()
        if self._step.averaging.in_step and loss is not None:
            named = [("the loss", torch.as_tensor(loss).detach())]
            advice = "Return strategy.mean(loss) from the closure, or None if the optimizer needs no loss."
            compare_tensors(self._ranks, named, "the closure's losses differ between the ranks", advice)
        return loss

    def _reevaluate(self, window: Window, closure: Callable[[], Any]) -> Any:
        """Evaluate a closure within an optimizer's step, with averaged and clipped gradients. Collective.

        Raises:
            NonFiniteError: a loss or a gradient is not finite, under any policy.
        """
        step = self._step
        window.clear()
        with step.hooks.suspended("update"):
            loss = self._evaluate(closure)
        if window.last is None:
            step.windows.take(window)
        step.averaging.finish(window)
        gradients = step.guard.gradients(window.parameters)
        if window.total.weight is not None:
            window.rescale(gradients)
        if not step.guard.clip(window.parameters, gradients, window.evidence.losses):
            policy = step.judge.nonfinite
            findings = policy.findings(window)
            message = policy.message(findings, window.parameters, "in an evaluation of the closure within a step")
            raise NonFiniteError(f"{message} The optimizer has moved the weights since: continue from a checkpoint.")
        return loss
