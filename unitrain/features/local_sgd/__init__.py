"""Rounds of steps on each rank alone (``local_steps``), after which the ranks average their weights."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from unitrain.config import StrategyConfig
from unitrain.errors import ConfigError

if TYPE_CHECKING:
    from unitrain.communication.backend import Backend
    from unitrain.training.loop.sockets import Sockets


def wanted(config: StrategyConfig) -> bool:
    """Return whether the settings ask for rounds."""
    return config.local_steps > 1


def check(config: StrategyConfig, backend: type[Backend]) -> None:
    """Refuse a backend that shards the model."""
    if backend.shards:
        raise ConfigError(
            f"local_steps is {config.local_steps}, but backend {backend.name} shards one model: use ddp or horovod."
        )


def plug_in(sockets: Sockets) -> None:
    """Average weights after rounds, in place of gradients in steps, and save what ranks don't share."""
    from unitrain.training.loop.averaging import Averaging

    from .rounds import LocalSGD
    from .states import LocalStates

    local = LocalSGD(sockets.communicator, sockets.prepared, sockets.config)
    sockets.averaging = Averaging(unit=sockets.communicator.world_size)
    sockets.replicas = local
    sockets.verdicts.append(local)
    sockets.hooks.add_hook(local)
    sockets.parts.append(partial(LocalStates.of, sockets.communicator, local))
