"""``EarlyStopping``: whether a metric still improves, decided identically on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from unitrain.communication.communicator import Communicator
from unitrain.errors import CheckpointError, UsageError

Mode = Literal["min", "max"]


class EarlyStopping:
    """Decides whether a metric has stopped improving. Made by ``strategy.early_stopping``.

    Attributes:
        best: the best value so far; None before the first one that is a number.
        waited: number of updates since then.

    Raises:
        UsageError: an argument is out of range.
    """

    def __init__(self, communicator: Communicator, mode: Mode, patience: int, min_delta: float) -> None:
        if mode not in ("min", "max"):
            raise UsageError(f"early_stopping: mode is {mode!r}, but must be 'min' or 'max'.")
        if patience < 1:
            raise UsageError(f"early_stopping: patience is {patience}, but must be at least 1.")
        if not 0 <= min_delta < math.inf:
            raise UsageError(f"early_stopping: min_delta is {min_delta}, but must be at least 0, and finite.")
        self._communicator = communicator
        self._mode, self._patience, self._min_delta = mode, patience, min_delta
        self.best: float | None = None
        self.waited: int = 0

    def update(self, value: Tensor | float | None) -> bool:
        """Add the metric's value after an evaluation, and return whether it is the best so far. Collective.

        NaN is no improvement.

        Args:
            value: a number, or a tensor with one element. That of rank 0 counts; other ranks' are ignored.

        Raises:
            UsageError: rank 0's value is not a number; on every rank.
        """
        number = self._communicator.on_main(lambda: _number(value))
        sign = 1 if self._mode == "max" else -1
        improved = not math.isnan(number) and (self.best is None or sign * (number - self.best) > self._min_delta)
        self.best, self.waited = (number, 0) if improved else (self.best, self.waited + 1)
        return improved

    @property
    def should_stop(self) -> bool:
        """Whether there was no improvement for ``patience`` updates; the same on all ranks."""
        return self.waited >= self._patience

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for a checkpoint."""
        return {"mode": self._mode, "best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of an object with the same mode; patience and min_delta may be others.

        Raises:
            CheckpointError: the mode was another one.
        """
        if state["mode"] != self._mode:
            raise CheckpointError(
                f"early_stopping: the checkpoint is of a metric with mode {state['mode']!r}, and this run has "
                f"{self._mode!r}: the best value of one says nothing about the other."
            )
        self.best, self.waited = state["best"], state["waited"]


def _number(value: object) -> float:
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()):
        return float(value)
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise UsageError(f"early_stopping: update() takes a number, not {kind}: pass meter.value(), say.")
