"""Local SGD and DiLoCo: the ranks train alone for a round of steps, and then average how far they have come.

A round is ``local_steps`` optimizer steps, or fewer at the end of an epoch. Within it, each rank steps on its own
gradients. At its end, the difference between the round's first weights and a rank's last ones, averaged over the ranks,
is the gradient of an outer optimizer, SGD with Nesterov momentum, which steps from the first weights. The next round
begins with the result. A learning rate of 1 without momentum averages the weights.

Stich, "Local SGD Converges Fast and Communicates Little" (ICLR 2019); Douillard et al., "DiLoCo: Distributed
Low-Communication Training of Language Models" (arXiv 2311.08105).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from unitrain.communication.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.device import HALF_DTYPES
from unitrain.errors import UsageError
from unitrain.training.gradients.gradients import GradientReducer
from unitrain.training.gradients.guard import GuardedStep
from unitrain.training.hooks import StepHook

_MOMENTUM = "momentum_buffer"


class LocalSGD(StepHook):
    """The rounds of a run.

    Attributes:
        steps: number of steps in the round so far; 0 between two rounds.
        length: number of steps in a whole round.
        failed: whether a step of the round was skipped on this rank, since a loss or gradient was non-finite.
    """

    def __init__(self, communicator: Communicator, config: StrategyConfig) -> None:
        self.steps: int = 0
        self.length: int = config.local_steps
        self.failed: bool = False
        self._communicator = communicator
        self._wire_dtype = HALF_DTYPES.get(config.compression)
        self._guard = GuardedStep(communicator.device, None, None)
        self._optimizer: Optimizer | None = None
        self._weights: list[Tensor] = []
        self._first: list[Parameter] = []  # of the round
        self._outer = SGD(
            [torch.zeros(0)], lr=config.outer_lr, momentum=config.outer_momentum, nesterov=config.outer_momentum > 0
        )
        self._reducer: GradientReducer | None = None
        self._momentum: dict[Tensor, Tensor] = {}  # of weights, until they are trained

    @torch.no_grad()
    def before_update(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> None:
        """Keep the first weights of a round."""
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            raise UsageError("local_steps supports one optimizer: give it all parameters, in groups.")
        if self.steps == 0:
            trained: list[Tensor] = [p for p in parameters if p.requires_grad]
            if len(trained) != len(self._weights) or not all(map(is_, trained, self._weights)):
                self._watch(trained)
            torch._foreach_copy_([*self._first], self._weights)

    def after_update(self, optimizer: Optimizer, parameters: Sequence[Parameter], stepped: bool) -> None:
        """Count a step."""
        self.steps += 1
        self.failed |= not stepped

    def _watch(self, trained: list[Tensor]) -> None:
        self._keep_momentum()
        self._weights, self._first = trained, [Parameter(torch.empty_like(p)) for p in trained]
        self._guard.all_plain = all(p.device == self._communicator.device for p in trained)
        self._outer.param_groups[0]["params"] = self._first
        for weight, first in zip(trained, self._first, strict=True):
            if weight in self._momentum:
                self._outer.state[first][_MOMENTUM] = self._momentum.pop(weight).to(first)
        self._reducer = GradientReducer(
            self._first,
            self._communicator,
            armed=lambda: False,
            name="local steps",
            wire_dtype=self._wire_dtype,
        )

    def _keep_momentum(self) -> None:
        for weight, first in zip(self._weights, self._first, strict=True):
            if _MOMENTUM in self._outer.state[first]:
                self._momentum[weight] = self._outer.state[first][_MOMENTUM]
        self._outer.state.clear()

    @torch.no_grad()
    def end_round(self) -> bool:
        """Average what the ranks have learned. Collective.

        Returns:
            Whether it was finite on all ranks; otherwise the weights are the round's first ones again.
        """
        assert self._reducer is not None
        if self.failed:
            self._weights[0].fill_(torch.nan)  # for all ranks to see
        for first, weight in zip(self._first, self._weights, strict=True):
            first.grad = (first - weight) / self._communicator.world_size
        if self._communicator.world_size > 1:
            self._reducer.finish()
        finite, _ = self._guard(self._outer, self._first, self._guard.gradients(self._first))
        for first in self._first:
            first.grad = None
        torch._foreach_copy_(self._weights, [*self._first])
        self.steps, self.failed = 0, False
        return finite

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the outer optimizer's state, with the numbers of parameters of the optimizer that trains them."""
        numbers = {p: n for n, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
        momentum = {
            numbers[weight]: {_MOMENTUM: self._outer.state[first][_MOMENTUM]}
            for weight, first in zip(self._weights, self._first, strict=True)
            if _MOMENTUM in self._outer.state[first]
        }
        return {"state": momentum, "param_groups": optimizer.state_dict()["param_groups"]}

    def load_state_dict(self, state: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Load this state for the parameters of an optimizer."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._outer.state.clear()
        self._weights, self._first = [], []
        self._momentum = {parameters[n]: one[_MOMENTUM] for n, one in state["state"].items()}
