"""The state at the end of an epoch's training: a run that is stopped in the evaluation after it does the rest again.

What follows the loop over batches (evaluate, step a scheduler, keep the best accuracy) may be half done when a signal
stops the run. The checkpoint that is saved then has the model as it is, and everything that this code may have changed
as it was before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from unitrain import rng
from unitrain.checkpoint.names import PARAMS
from unitrain.checkpoint.run_state import RunState
from unitrain.checkpoint.writer import snapshot
from unitrain.data.structure import tensors
from unitrain.training.hooks import StepHook
from unitrain.training.loop.step import TrainingStep

_MOST_BYTES = 2**20  # of an object's tensors; larger ones are weights, which this code does not change


class EpochEnd(NamedTuple):
    """A copy of the small states of a run."""

    step: int  # number of optimizer steps so far
    states: dict[str, Any]  # states of schedulers, loaders, dicts and other objects, by name
    options: dict[str, list[dict[str, Any]]]  # options of the parameter groups of each optimizer, by name
    random: dict[str, Any]  # state of this rank's random number generators

    def applied_to(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states of all objects as they were, given those of now."""
        earlier = {**parts, **self.states}
        for name, groups in self.options.items():
            now = parts[name]
            changed = [{**group, **options} for group, options in zip(now["param_groups"], groups, strict=False)]
            earlier[name] = {**now, "param_groups": changed}
        return earlier


class EpochEndHook(StepHook):
    """Remembers what the code after the loop over batches may change, at the end of each training iteration."""

    place = 0

    def __init__(self, state: RunState, step: TrainingStep) -> None:
        self._state = state
        self._step = step
        self.last: EpochEnd | None = None  # what was remembered last

    def at_epoch_end(self) -> None:
        """Copy the small states of the run."""
        states, options = {}, {}
        for name, value in self._state.objects.items():
            if isinstance(value, Optimizer):
                groups = [{key: its for key, its in group.items() if key != PARAMS} for group in value.param_groups]
                options[name] = snapshot(groups)
            elif not isinstance(value, nn.Module):
                state = self._state.of(value)
                if sum(tensor.nbytes for tensor in tensors(state, opened=True)) <= _MOST_BYTES:
                    states[name] = snapshot(state)
        self.last = EpochEnd(self._step.global_step, states, options, rng.capture())

    @property
    def pending(self) -> EpochEnd | None:
        """The state at the end of the iteration, while what follows it in the script is not done yet; else None."""
        last = self.last
        valid = last is not None and self._step.batches.between_epochs and last.step == self._step.global_step
        return last if valid else None
