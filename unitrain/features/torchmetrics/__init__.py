"""The states of torchmetrics' metrics in checkpoints."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from unitrain.config import StrategyConfig

if TYPE_CHECKING:
    from unitrain.training.loop.sockets import Sockets


def wanted(config: StrategyConfig) -> bool:
    """Return True: whether a script has metrics shows in its checkpoints."""
    return True


def plug_in(sockets: Sockets) -> None:
    """Save what the metrics of all ranks have accumulated."""
    from .states import MetricStates

    sockets.parts.append(partial(MetricStates.of, sockets.communicator))
