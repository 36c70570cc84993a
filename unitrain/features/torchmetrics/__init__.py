"""The states of torchmetrics' metrics in checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unitrain.config import StrategyConfig

if TYPE_CHECKING:
    from unitrain.training.feature import Feature


def make(config: StrategyConfig) -> Feature:
    """Return what saves the states that the metrics of all ranks have accumulated."""
    from unitrain.features.torchmetrics.states import SavesMetrics

    return SavesMetrics()
