"""Steps that a script makes itself on a model of several processes, with gradients that need not be averaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unitrain.errors import UsageError


class ForeignSteps:
    """Refuses the step of any optimizer over prepared parameters that is not the strategy's own.

    Args:
        is_prepared: tells of a parameter whether it is a prepared module's.

    Attributes:
        own: whether the strategy is stepping.
    """

    def __init__(self, is_prepared: Callable[[Parameter], bool]) -> None:
        self.own = False
        self._is_prepared = is_prepared
        self._harmless: WeakSet[Optimizer] = WeakSet()
        self._hook = register_optimizer_step_pre_hook(self._check)

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.own or optimizer in self._harmless:
            return
        if any(self._is_prepared(p) for group in optimizer.param_groups for p in group["params"]):
            raise UsageError(
                "an optimizer of a prepared model was stepped by itself. The gradients of several processes are "
                "averaged, clipped and checked in strategy.step(loss, optimizer), or in strategy.backward and "
                "strategy.update: call these instead of loss.backward() and optimizer.step()."
            )
        self._harmless.add(optimizer)

    def close(self) -> None:
        """Let every optimizer step."""
        self._hook.remove()
