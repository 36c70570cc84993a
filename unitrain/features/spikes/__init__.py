"""Finds steps with unusually large gradients, which all ranks skip, or undo."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from unitrain.config import Section, StrategyConfig
from unitrain.features import Exclusion

if TYPE_CHECKING:
    from unitrain.training.feature import Feature

SETTING = "on_spike"
EXCLUDES = (
    Exclusion(
        "compression", "powersgd carries a skipped gradient into later steps", ("powersgd",), by=("skip", "rewind")
    ),
    Exclusion("memory_copies.every", "rewind goes back to a copy in memory", (0,), by=("rewind",)),
)


class Settings(Section):
    """The setting that this feature adds to a run."""

    on_spike: Literal["ignore", "warn", "skip", "rewind", "stop"] = "ignore"
    """What ranks do if the norm of the gradients is far above the last 128 steps'; rewind: go back about 100 steps."""


def make(config: StrategyConfig) -> Feature:
    """Return the feature that judges each step by the norm of its gradients."""
    from unitrain.features.spikes.spikes import Spikes

    return Spikes(Settings.of(config).on_spike)
