"""A run for tests of what is kept where: it saves without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from unitrain import Strategy
from unitrain.checkpoint import Checkpoint


class SavedRun:
    """A run whose model's weight is the step, saved without training to a folder or a URL."""

    def __init__(self, strategy: Strategy, place: str | Path, *, keep: int = 2, background: bool = False) -> None:
        self.strategy = strategy
        self.model = nn.Linear(1, 1)
        self.notes: dict[str, Any] = {}
        self.checkpoint: Checkpoint = strategy.checkpoint(
            place, model=self.model, notes=self.notes, keep=keep, background=background
        )

    def save(self, *steps: int, best: bool = False) -> Self:
        for step in steps:
            self.strategy.training_step.global_step = step
            with torch.no_grad():
                self.model.weight.fill_(step)
            self.checkpoint.save(best=best)
        self.checkpoint.wait()
        return self

    def resumed(self, path: str | Path | None = None) -> int:
        """Resume, and return the step."""
        assert self.checkpoint.resume(path)
        assert self.model.weight.item() == self.strategy.global_step
        return self.strategy.global_step
