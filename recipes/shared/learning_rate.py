"""``LearningRate``: scaling with the batch size, warm-up, schedule and floor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from unitrain import ConfigError

Scaling = Literal["none", "linear", "sqrt"]
Schedule = Literal["cosine", "step", "constant"]

_POWER = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}


@dataclass(frozen=True)
class LearningRate:
    """A learning rate as a function of the optimizer step. ``str()`` returns a description.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
    """

    base: float
    """The learning rate at ``reference_batch``, or at any batch size if ``scaling`` is none."""
    total_steps: int
    """Number of optimizer steps of the whole training."""
    warmup_steps: int = 0
    """Number of steps of linear warm-up to the peak, before the schedule begins."""
    schedule: Schedule = "cosine"
    """After warm-up: half a cosine down to the floor, a factor of 0.1 after each third of all steps, or constant."""
    floor: float = 0.0
    """Lowest learning rate of the schedule. Warm-up may begin below it."""
    scaling: Scaling = "none"
    """Scale the peak by batch_size / reference_batch (linear), by its square root (sqrt), or not (none)."""
    batch_size: int = 256
    """Samples per optimizer step, over all processes."""
    reference_batch: int = 256
    """The batch size that ``base`` is meant for."""

    def __post_init__(self) -> None:
        if self.base <= 0 or self.total_steps < 1 or self.batch_size < 1 or self.reference_batch < 1:
            raise ConfigError(
                "the learning rate, its total_steps and both batch sizes must be greater than 0, but are "
                f"{self.base:g}, {self.total_steps}, {self.batch_size} and {self.reference_batch}."
            )
        if not 0 <= self.warmup_steps <= self.total_steps:
            raise ConfigError(
                f"warm-up takes {self.warmup_steps} steps, but training has only {self.total_steps}: shorten the "
                "warm-up or train longer."
            )
        if not 0 <= self.floor <= self.peak:
            raise ConfigError(
                f"the learning rate's floor is {self.floor:g}, but must be between 0 and the peak, {self.peak:g}."
            )

    @property
    def peak(self) -> float:
        """The highest learning rate, scaled with the batch size. Create the optimizer with it as ``lr``."""
        return self.base * math.pow(self.batch_size / self.reference_batch, _POWER[self.scaling])

    def at(self, step: int) -> float:
        """Return the learning rate of an optimizer step, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        if self.schedule == "step":
            thirds = min(3 * step // self.total_steps, 2)
            return max(self.floor, self.peak * 0.1**thirds)
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))

    def scheduler(self, optimizer: Optimizer) -> LambdaLR:
        """Return a torch scheduler for an optimizer created with ``lr=peak``. Step it after each optimizer step.

        Parameter groups with other learning rates keep their ratio to the first.
        """
        return LambdaLR(optimizer, lambda step: self.at(step) / self.peak)

    def __str__(self) -> str:
        peak, scaling = f"{self.base:g}", "not scaled with the batch"
        if self.scaling != "none":
            ratio = f"{self.batch_size}/{self.reference_batch}"
            ratio = ratio if self.scaling == "linear" else f"sqrt({ratio})"
            peak, scaling = f"{self.base:g} * {ratio} = {self.peak:g}", f"{self.scaling} scaling"
        warmup = f"warm-up over {self.warmup_steps} of {self.total_steps} steps" if self.warmup_steps else "no warm-up"
        then = {
            "cosine": f"cosine to {self.floor:g}",
            "step": f"a factor of 0.1 after each third, at least {self.floor:g}",
            "constant": "constant",
        }[self.schedule]
        return f"{peak} ({scaling}), {warmup}, then {then}"
