"""``TrainingSettings``: the settings that recipes have in common."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

import unitrain
from unitrain import Section
from unitrain.features.trackers import TrackerName
from unitrain.recipes.shared.learning_rate import LearningRate, Scaling, Schedule


class TrainingSettings(Section):
    """Settings of a training run; each is a flag, and a key in the file passed to ``--config``.

    A recipe derives its own from it, adds fields, and gives other defaults.
    """

    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset({
        "strategy", "output_dir", "workers", "max_steps", "checkpoint_every", "keep", "resume", "force", "profile",
        "tracker",
    })  # fmt: skip
    """Settings that may be others when a run is resumed, because results don't depend on them."""

    epochs: Annotated[int, Field(ge=1)] = 20
    """Passes over the training set."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Stop after this many optimizer steps. The learning rate schedule is still planned for all epochs."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Samples per optimizer step, over all processes."""
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Peak learning rate, before scaling."""
    lr_scaling: Scaling = "none"
    """Scale lr by batch-size / lr-reference-batch (linear), by its square root (sqrt), or not (none)."""
    lr_reference_batch: Annotated[int, Field(ge=1)] = 256
    """Batch size that lr was chosen for, if lr is scaled."""
    lr_schedule: Schedule = "cosine"
    """After warm-up: half a cosine (cosine), a factor of 0.1 after each third of training (step), or constant."""
    lr_floor: Annotated[float, Field(ge=0)] = 0.0
    """Lowest learning rate of the schedule."""
    warmup_epochs: Annotated[float, Field(ge=0)] = 1.0
    """Epochs (fractions allowed) of linear warm-up to the peak."""
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4
    """Weight decay of the optimizer."""
    workers: Annotated[int, Field(ge=0)] = 0
    """DataLoader workers per process; 0 loads samples in the training process."""
    output_dir: Path | None = None
    """Folder of the results and checkpoints; a run in it is resumed. null creates a new one in runs/."""
    checkpoint_every: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps between checkpoints; null saves one after each epoch."""
    keep: Annotated[int, Field(ge=1)] = 3
    """Number of newest checkpoints to keep."""
    resume: str = "auto"
    """auto: from the newest checkpoint in output-dir, if any; best; never: from the start; or a checkpoint's PATH."""
    force: bool = False
    """Resume even if settings have changed since the checkpoint."""
    tracker: tuple[TrackerName, ...] = ("tensorboard",)
    """Trackers that get the metrics: tensorboard, wandb, mlflow, or several of them, as tensorboard,wandb."""
    profile: bool = False
    """Write a trace of the fifth to the eighth step of all ranks to output-dir."""
    strategy: unitrain.StrategyConfig = unitrain.StrategyConfig()

    @property
    def last_step(self) -> float:
        """The optimizer step to stop after; infinity if there is none."""
        return self.max_steps or math.inf

    def learning_rate(self, steps_per_epoch: int) -> LearningRate:
        """Return the learning rate of a training with this many optimizer steps in an epoch."""
        return LearningRate(
            base=self.lr,
            total_steps=self.epochs * steps_per_epoch,
            warmup_steps=round(self.warmup_epochs * steps_per_epoch),
            schedule=self.lr_schedule,
            floor=self.lr_floor,
            scaling=self.lr_scaling,
            batch_size=self.batch_size,
            reference_batch=self.lr_reference_batch,
        )

    def loading(self) -> dict[str, Any]:
        """Return the options of the loaders that follow from the settings."""
        return {"global_batch_size": self.batch_size, **self.reading()}

    def reading(self) -> dict[str, Any]:
        """Return those of a loader that is given whole batches."""
        return {"num_workers": self.workers, "persistent_workers": self.workers > 0}

    def decisive(self) -> dict[str, Any]:
        """Return the settings that results depend on, as plain data for ``strategy.checkpoint(config=...)``."""
        return self.model_dump(mode="json", exclude=set(self.MAY_CHANGE))
