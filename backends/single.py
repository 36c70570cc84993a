"""One process, one device."""

from __future__ import annotations

from unitrain.sole_strategy import SoleStrategy


class SingleStrategy(SoleStrategy):
    """Trains on one device, without a wrapper and without communication."""

    name = "single"
