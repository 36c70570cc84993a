"""Divides the state and the update of optimizers over the ranks (ZeRO-1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unitrain.config import Section, StrategyConfig

if TYPE_CHECKING:
    from unitrain.training.feature import Feature

SETTING = "shard_optimizer"
VERIFIED: tuple[dict[str, Any], ...] = (
    {"name": SETTING, "settings": {SETTING: True, "clip_norm": 0.05}, "optimizer": "adamw", "tied": True},
)


class Settings(Section):
    """The setting that this feature adds to a run."""

    shard_optimizer: bool = False
    """Divide the optimizer's state and its update over the ranks (ZeRO-1): less memory; fsdp does so in any case."""


def make(config: StrategyConfig) -> Feature:
    """Return the feature that shards optimizers."""
    from unitrain.features.sharded_optimizer.optimizers import ShardedOptimizers

    return ShardedOptimizers()
