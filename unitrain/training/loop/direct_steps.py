"""Detects ``optimizer.step()`` called by a script itself, with gradients that were not averaged over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unitrain.errors import UsageError


class DirectStepCheck:
    """Refuses steps of optimizers of prepared parameters that are not made by the strategy.

    Args:
        is_prepared: returns whether a parameter belongs to a prepared module.

    Attributes:
        allowed: whether the strategy is making a step.
    """

    def __init__(self, is_prepared: Callable[[Parameter], bool]) -> None:
        self.allowed: bool = False
        self._is_prepared = is_prepared
        self._harmless: WeakSet[Optimizer] = WeakSet()
        self._hook = register_optimizer_step_pre_hook(self._check)

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.allowed or optimizer in self._harmless:
            return
        if any(self._is_prepared(p) for group in optimizer.param_groups for p in group["params"]):
            raise UsageError(
                "optimizer.step() was called for a prepared model. With several processes, gradients are averaged, "
                "clipped and checked in strategy.step(loss, optimizer), or in strategy.backward and strategy.update: "
                "call these instead of loss.backward() and optimizer.step()."
            )
        self._harmless.add(optimizer)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Context manager in which steps are allowed."""
        self.allowed = True
        try:
            yield
        finally:
            self.allowed = False

    def close(self) -> None:
        """Remove the check."""
        self._hook.remove()
