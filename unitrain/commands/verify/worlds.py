"""The worlds that can be started on this host: launcher, number of processes and backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from unitrain.errors import UnitrainError
from unitrain.launch.local.launchers import local_launchers
from unitrain.testing.worlds import sees_world

# Three processes divide a batch unevenly. Two are enough for launchers that are slow to start.
_SIZES = {"python": (1,), "torchrun": (2, 3), "mpirun": (2, 3), "horovodrun": (2,), "srun": (2,)}
_NONE: Mapping[str, Any] = {}


class World(NamedTuple):
    """A number of processes that a launcher starts on this host, and a backend that works under it.

    Attributes:
        launcher: one of ``local_launchers()``.
        size: the number of processes.
        backend: the name of the backend.
    """

    launcher: str
    size: int
    backend: str

    def __str__(self) -> str:
        return f"{self.launcher} x{self.size}"


def find_worlds(backends: Sequence[str], *, device: str = "cpu") -> list[World]:
    """Return the worlds that can be started here with any of ``backends``.

    Args:
        backends: names of backends.
        device: the setting ``device`` that the worlds must support.
    """
    return [
        world
        for launcher in local_launchers()
        for size in _SIZES.get(launcher, ())
        for backend in backends
        if works(world := World(launcher, size, backend), device)
    ]


def works(world: World, device: str, settings: Mapping[str, Any] = _NONE) -> bool:
    """Return whether the backend of a world supports the launcher, the device and settings.

    Args:
        world: the world.
        device: the setting ``device``.
        settings: further settings of the strategy.
    """
    try:
        # Asked of the backend itself, so that plug-ins are judged by their own rules.
        return sees_world(world.backend, world.launcher, world.size, **{"device": device, **settings})
    except UnitrainError:
        return False
