"""What a loop writes down of a case: the same for the plain loop and for each rank of a strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass
class Trace:
    """One process's record of a case."""

    samples: list[list[int]] = field(default_factory=list)
    """Indices that the process trained on, for each optimizer step."""
    losses: list[tuple[float, float]] = field(default_factory=list)
    """For each batch, the loss and what it weighs (samples or tokens), before the update."""
    gradients: list[Tensor] = field(default_factory=list)
    """For each step that was taken, what the optimizer was given, flat."""
    norms: list[float] = field(default_factory=list)
    """For each step that was taken, the norm of the gradients before clipping, where they are clipped by it."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers at the end."""
    error: str | None = None
    """Why the case could not be finished."""

    def watch(self, optimizer: Optimizer) -> None:
        """Write down the gradients of every step that ``optimizer`` takes from now on."""

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self.gradients.append(torch.cat([g.detach().double().reshape(-1).cpu() for g in gradients]))

        optimizer.register_step_pre_hook(before_step)

    def finish(self, model: nn.Module) -> None:
        """Write down the weights."""
        self.weights = {name: t.detach().double().cpu().clone() for name, t in model.state_dict().items()}

    def save(self, path: Path) -> None:
        """Write the trace as a file of tensors and plain data."""
        torch.save(self.__dict__, path)

    @staticmethod
    def load(path: Path) -> Trace:
        """Read a trace."""
        values: Mapping[str, Any] = torch.load(path, weights_only=True)
        return Trace(**values)
