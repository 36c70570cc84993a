"""The record of a case, the same for the plain loop and for each rank of a strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass
class Trace:
    """One process's record of a case."""

    samples: list[list[int]] = field(default_factory=list)
    """Indices of the samples of each optimizer step."""
    losses: list[tuple[float, float]] = field(default_factory=list)
    """Loss and weight (number of samples or tokens) of each batch."""
    gradients: list[Tensor] = field(default_factory=list)
    """Gradients of each step as passed to the optimizer, flattened."""
    norms: list[float] = field(default_factory=list)
    """Norm of the gradients of each step before clipping, in cases that clip by norm."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers at the end."""

    def watch(self, optimizer: Optimizer, full: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        """Record the gradients of every step of ``optimizer`` from now on; ``full`` gathers one that is sharded."""

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self.gradients.append(torch.cat([full(g.detach()).double().reshape(-1).cpu() for g in gradients]))

        optimizer.register_step_pre_hook(before_step)

    def finish(self, model: nn.Module) -> None:
        """Record the weights."""
        self.weights = {name: t.detach().double().cpu().clone() for name, t in model.state_dict().items()}
