"""What ranks do at a step with unusually large gradients (``on_spike``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unitrain.config import StrategyConfig

if TYPE_CHECKING:
    from unitrain.training.loop.sockets import Sockets


def wanted(config: StrategyConfig) -> bool:
    """Return whether the settings ask for it."""
    return config.on_spike != "ignore"


def plug_in(sockets: Sockets) -> None:
    """Judge each step by the norm of its gradients, and save the norms."""
    from .spikes import Rewind, Spikes

    rewind = None
    if sockets.config.on_spike == "rewind":
        rewind = Rewind(sockets.communicator, sockets.prepared, sockets.followers)
        sockets.hooks.add_hook(rewind)
    spikes = Spikes(sockets.communicator, sockets.config.on_spike, rewind)
    sockets.verdicts.append(spikes)
    sockets.values["spikes"] = spikes
