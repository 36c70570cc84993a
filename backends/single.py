"""One process, one device."""

from __future__ import annotations

from unitrain.backend import LocalBackend


class SingleBackend(LocalBackend):
    """Trains on one device, without a wrapper and without communication."""

    name = "single"
