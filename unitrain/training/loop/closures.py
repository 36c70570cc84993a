"""Steps of optimizers that evaluate a closure several times: LBFGS, sharpness-aware minimisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

import torch
from torch.optim import Optimizer

from unitrain.errors import UsageError
from unitrain.training.gradients.sharded_guard import guard_for
from unitrain.training.loop.judge import NonFinitePolicy
from unitrain.training.loop.script_gradients import check_settings
from unitrain.training.loop.sockets import Sockets
from unitrain.training.loop.step import TrainingStep
from unitrain.training.models.in_sync import compare_tensors
from unitrain.training.windows.window import Window


class Closures:
    """Has optimizers evaluate a closure of the script, each time with averaged, checked and clipped gradients.

    Args:
        sockets: the parts of the run.
        step: makes the steps.
    """

    def __init__(self, sockets: Sockets, step: TrainingStep) -> None:
        self._config, self._ranks = config, ranks = sockets.config, sockets.communicator
        self._windows, self._hooks, self._averaging = step.windows, step.hooks, step.averaging
        self._nonfinite = NonFinitePolicy(ranks, sockets.prepared, config.on_nonfinite)
        self._guard = guard_for(ranks, config.clip_norm, config.clip_value, lambda norm: False)
        self._hooks.add_hook(self._guard)
        self._call_backward = False  # whether the last closure called the strategy's

    @contextmanager
    def passed(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Iterator[None]:
        """Pass a closure to ``optimizer.step()`` in the block.

        If the optimizer has no gradients yet, the closure is evaluated before, since hooks and the guard judge a step
        by its first gradients.

        Raises:
            UsageError: the settings don't allow closures.
        """
        check_settings(self._config, "update() was passed a closure")
        if self._ranks.sharding.of_optimizers:
            raise UsageError("shard_optimizer does not support closures, which need all parameters: set it to false.")
        window = self._windows.register(optimizer)
        if window.last is None and all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
            self._evaluate(window, closure)
        replaced = {name: step for name, step in vars(optimizer).items() if name == "step"}  # by a scheduler
        evaluated = partial(optimizer.step, partial(self._reevaluate, window, closure))
        vars(optimizer)["step"] = update_wrapper(evaluated, optimizer.step)
        try:
            yield
        finally:
            del vars(optimizer)["step"]
            vars(optimizer).update(replaced)
            window.clear()

    def _evaluate(self, window: Window, closure: Callable[[], Any]) -> Any:
        """Call a closure, and return its loss, which must be the same on all ranks. Collective."""
        # A backward of the script must not average: the gradients then differ between the ranks, and it is refused.
        self._averaging.expect(self._call_backward)
        with torch.enable_grad():
            loss = closure()
        self._call_backward = window.last is not None
        if self._averaging.in_step and loss is not None:
            named = [("the loss", torch.as_tensor(loss).detach())]
            advice = "Return strategy.mean(loss) from the closure, or None if the optimizer needs no loss."
            compare_tensors(self._ranks, named, "the closure's losses differ between the ranks", advice)
        return loss

    def _reevaluate(self, window: Window, closure: Callable[[], Any]) -> Any:
        """Evaluate a closure within an optimizer's step, with averaged and clipped gradients. Collective."""
        averaged = self._averaging.in_step
        window.clear()
        with self._hooks.suspended("update"):
            loss = self._evaluate(window, closure)
        if window.last is None:
            self._windows.take(window)
        if averaged:
            self._averaging.finish(window)
        gradients = self._guard.gradients(window.parameters)
        if window.total.weight is not None:
            window.rescale(gradients, 1)
        if not self._guard.clip(window.parameters, gradients, () if averaged else window.evidence.losses):
            self._nonfinite.end_closure(window, averaged=averaged)
        return loss
