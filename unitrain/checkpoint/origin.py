"""Where a checkpoint comes from: the settings of its run, as its manifest has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import torch

from unitrain.checkpoint.store.located import Manifest
from unitrain.config import StrategyConfig, flattened

_version = cache(version)  # it reads a file


@dataclass(frozen=True)
class Origin:
    """The settings of a run, for the manifests of its checkpoints, and to compare with another start.

    Attributes:
        settings: the strategy's settings.
        config: the script's settings, as plain data.
        world_size: number of processes.
        has_loader: whether loaders are saved. They compare the global batch themselves, which does not depend on the
            number of micro-batches.
    """

    settings: StrategyConfig
    config: Mapping[str, Any]
    world_size: int
    has_loader: bool

    def about(self) -> dict[str, Any]:
        """Return the run's entries in a manifest."""
        return {
            "unitrain": _version("unitrain"),
            "torch": torch.__version__,
            "world_size": self.world_size,
            "strategy": self.settings.model_dump(mode="json"),
            "config": dict(self.config),
        }

    def changed_settings(self, manifest: Manifest) -> list[str]:
        """Return the settings that affect training and differ from a checkpoint, with both values."""
        now = flattened(self.settings.model_dump(mode="json"))
        # What the checkpoint's version of the settings did not have was as it is by default.
        saved = {**flattened(type(self.settings)().model_dump(mode="json")), **flattened(manifest.strategy)}
        compared = [*self.settings.names_fixed(), *(() if self.has_loader else ("accumulate",))]
        pairs = [(f"strategy.{name}", saved[name], now[name]) for name in compared]
        names = dict.fromkeys([*manifest.config, *self.config])
        pairs += [(name, manifest.config.get(name), self.config.get(name)) for name in names]
        return [f"{name} was {old!r} and is now {new!r}" for name, old, new in pairs if old != new]
