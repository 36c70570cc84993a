"""torchmetrics' metrics: synchronised on any backend, with their states in checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unitrain.config import StrategyConfig
from unitrain.features.torchmetrics.synchronisation import synchronise_metric

if TYPE_CHECKING:
    from unitrain.training.feature import Feature

__all__ = ["synchronise_metric"]


def make(config: StrategyConfig) -> Feature:
    """Return the feature that saves states of metrics, and refuses metrics that are not synchronised."""
    from unitrain.features.torchmetrics.metrics_of_run import MetricsOfRun

    return MetricsOfRun()
