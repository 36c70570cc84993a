"""What can be deleted: each folder is a feature, found by being there.

It has ``wanted(config)`` and ``plug_in(sockets)``, and perhaps ``check(config, backend)``, which refuses a backend, and
``attach(checkpoint, sockets)``, which adds hooks to a checkpoint that was opened.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from unitrain.config import StrategyConfig

if TYPE_CHECKING:
    from unitrain.checkpoint import Checkpoint
    from unitrain.communication.backend import Backend
    from unitrain.training.loop.sockets import Sockets


def check(config: StrategyConfig, backend: type[Backend]) -> None:
    """Raise ConfigError if a feature that the settings ask for does not work with a backend."""
    for feature in _wanted(config):
        if hasattr(feature, "check"):
            feature.check(config, backend)


def plug_in(sockets: Sockets) -> None:
    """Plug in the features that the settings ask for."""
    for feature in _wanted(sockets.config):
        feature.plug_in(sockets)


def attach(checkpoint: Checkpoint, sockets: Sockets) -> None:
    """Attach the features that the settings ask for to a checkpoint that was opened. Collective."""
    for feature in _wanted(sockets.config):
        if hasattr(feature, "attach"):
            feature.attach(checkpoint, sockets)


def _wanted(config: StrategyConfig) -> Iterator[Any]:
    for found in pkgutil.iter_modules(__path__):
        feature: Any = import_module(f"{__name__}.{found.name}")
        if feature.wanted(config):
            yield feature
