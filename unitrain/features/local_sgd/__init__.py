"""Rounds of steps on each rank alone, after which the ranks average their weights: local SGD and DiLoCo."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, model_validator

from unitrain.config import Section, StrategyConfig, conflict
from unitrain.errors import ConfigError
from unitrain.features import Exclusion

if TYPE_CHECKING:
    from unitrain.communication.backend import Backend
    from unitrain.training.feature import Feature

_DIFFERENT = "ranks have different weights within a round"
SETTING = "local_sgd.steps"
EXCLUDES = (
    Exclusion("sync_batchnorm", _DIFFERENT),
    Exclusion("memory_copies.every", _DIFFERENT, allowed=(0,)),
    Exclusion("shard_optimizer", "each rank has an optimizer state of its own"),
    Exclusion("compression", "powersgd compresses gradients: use bf16 or fp16", ("powersgd",)),
    Exclusion("precision", "ranks would skip different steps: use bf16", ("fp16",)),
    Exclusion("on_nonfinite", "ranks would skip different steps", ("skip",)),
    Exclusion("on_spike", "ranks have different gradients"),
)


class LocalSGDSettings(Section):
    """Steps that ranks make alone before they average their weights (local SGD, DiLoCo)."""

    fixed_in_run: ClassVar[tuple[str, ...]] = ("steps", "outer_lr", "outer_momentum")

    steps: Annotated[int, Field(ge=1, le=10**9)] = 1
    """Optimizer steps in a round; 1: average the gradients of every step."""
    outer_lr: Annotated[float, Field(gt=0)] = 0.7
    """Learning rate of the outer optimizer; 1, with outer_momentum 0, averages the weights."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Nesterov momentum of the outer optimizer."""

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> LocalSGDSettings:
        for name in ("outer_lr", "outer_momentum"):
            if self.steps == 1 and getattr(self, name) != LocalSGDSettings.model_fields[name].default:
                raise conflict("steps", name, "every step averages gradients, so there is no outer optimizer")
        return self


class Settings(Section):
    """The settings that this feature adds to a run."""

    local_sgd: LocalSGDSettings = LocalSGDSettings()


def check(config: StrategyConfig, backend: type[Backend]) -> None:
    """Refuse a backend that shards the model."""
    if backend.shards:
        steps = Settings.of(config).local_sgd.steps
        raise ConfigError(
            f"Backend {backend.name} does not support local_sgd.steps {steps}: each rank must hold a whole model. Use "
            "ddp or horovod, or local_sgd.steps 1."
        )


def make(config: StrategyConfig) -> Feature:
    """Return the feature that averages weights after rounds, in place of gradients in steps."""
    from unitrain.features.local_sgd.rounds import LocalSGD

    return LocalSGD(Settings.of(config).local_sgd)
