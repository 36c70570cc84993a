"""The state at the end of an epoch's training: a run that is stopped in the evaluation after it does the rest again.

What follows the loop over batches (evaluate, step a scheduler, keep the best accuracy) may be half done when a signal
stops the run. The checkpoint that is saved then has the model as it is, and everything that this code may have changed
as it was before it.
"""

from __future__ import annotations

from typing import Any

from unitrain.checkpoint.contents import Contents
from unitrain.training.hooks import StepHook
from unitrain.training.loop.step import TrainingStep


class EpochEnd(StepHook):
    """Copies the states that code after the loop over batches may change, at the end of each training iteration."""

    place = 90
    of_checkpoint = True

    def __init__(self, contents: Contents, step: TrainingStep) -> None:
        self._contents = contents
        self._step = step
        self._last: tuple[int, dict[str, Any]] | None = None  # the number of steps, and the copies

    def at_epoch_end(self) -> None:
        """Copy the small states of the run."""
        self._last = self._step.global_step, self._contents.remember()

    def forget(self) -> None:
        """Drop the copies: the script has other objects now."""
        self._last = None

    @property
    def pending(self) -> dict[str, Any] | None:
        """The copies, until the script begins the next epoch; else None."""
        if self._last is None or not self._step.batches.between_epochs or self._last[0] != self._step.global_step:
            return None
        return self._last[1]
