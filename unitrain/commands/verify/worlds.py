"""The worlds that can be started on this host: launcher, number of processes and backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unitrain.backend import load_backend
from unitrain.commands.launchers import local_launchers
from unitrain.config import StrategyConfig
from unitrain.errors import UnitrainError
from unitrain.launch.detect import Launch

_SIZES = {"python": (1,), "torchrun": (2, 3), "mpirun": (2, 3), "horovodrun": (2,), "srun": (2,)}


@dataclass(frozen=True)
class World:
    """A number of processes that a launcher starts on this host, and a backend that works under it."""

    launcher: str
    size: int
    backend: str

    def __str__(self) -> str:
        return f"{self.launcher} x{self.size}"


def find_worlds(
    backends: Sequence[str], sizes: Mapping[str, Sequence[int]] = _SIZES, *, device: str = "cpu"
) -> list[World]:
    """Return the worlds that can be started here with any of ``backends``.

    Args:
        backends: names of backends.
        sizes: numbers of processes, by launcher.
        device: device of the processes.
    """
    candidates = [(launcher, size) for launcher in local_launchers() for size in sizes.get(launcher, ())]
    return [
        World(launcher, size, backend)
        for launcher, size in candidates
        for backend in backends
        if _works(backend, device, Launch(launcher, world_size=size, local_world_size=size))
    ]


def _works(backend: str, device: str, launch: Launch) -> bool:
    try:
        found = load_backend(backend)
        found.check(StrategyConfig(backend=backend, device=device), launch)
    except UnitrainError:
        return False
    return found.expected_world(launch) == launch.world_size
