"""BatchNorm over the global batch.

It is always on: without its setting, torch's own ``SyncBatchNorm`` layers are synchronised, and no others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from unitrain.config import Section, StrategyConfig
from unitrain.errors import ConfigError

if TYPE_CHECKING:
    from unitrain.communication.backend import Backend
    from unitrain.training.feature import Feature


AS_ONE_DEVICE = {"sync_batchnorm": True}
VERIFIED: tuple[dict[str, Any], ...] = (
    {"name": "sync_batchnorm", "settings": {"sync_batchnorm": True}, "batch_norm": True},
)


class Settings(Section):
    """The setting that this feature adds to a run."""

    fixed_in_run: ClassVar[tuple[str, ...]] = ("sync_batchnorm",)

    sync_batchnorm: bool = False
    """Compute BatchNorm statistics over the global batch instead of each process's part of it."""


def check(config: StrategyConfig, backend: type[Backend]) -> None:
    """Refuse a backend that splits a process's batches over several devices, unless only torch's layers are meant."""
    devices = backend.replicas(config)
    if devices > 1 and Settings.of(config).sync_batchnorm:
        raise ConfigError(
            f"sync_batchnorm is not supported by backend {backend.name} on {devices} devices: each replica normalises "
            f"its own part of the batch. Use backend ddp (torchrun --nproc-per-node {devices} ...)."
        )


def make(config: StrategyConfig) -> Feature:
    """Return the feature that replaces BatchNorm layers of modules that are prepared."""
    from unitrain.features.sync_batchnorm.layers import Synchronisation

    return Synchronisation(only_torchs=not Settings.of(config).sync_batchnorm)
