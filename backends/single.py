"""The backend single: one process, one device."""

from __future__ import annotations

from unitrain.communication.backend import LocalBackend


class SingleBackend(LocalBackend):
    """Runs on one device, without wrapping modules and without communication."""

    name = "single"
