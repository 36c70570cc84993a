"""``World``: a backend on a number of processes, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import unitrain
from unitrain import Backend, BackendError, ConfigError, LaunchError, Strategy
from unitrain.communication.backend import load_backend
from unitrain.launch.detect import Launch
from unitrain.launch.local.launchers import local_launchers
from unitrain.testing.ranks import Launcher, run_ranks


@dataclass(frozen=True)
class World:
    """A backend on a number of processes of this host, on the CPU.

    Attributes:
        backend: the name of the backend.
        processes: the number of processes.
    """

    backend: str
    processes: int
    launcher: Launcher = "spawn"
    """What starts the processes; "python" for one process without a launcher."""

    def __str__(self) -> str:
        return f"{self.backend}-x{self.processes}"

    @property
    def kind(self) -> type[Backend]:
        """The backend's class."""
        return load_backend(self.backend)

    @property
    def averages_gradients(self) -> bool:
        """Whether the backend averages gradients itself, instead of in the core's buckets."""
        return self.processes > 1 and self.kind.watch_gradients is not Backend.watch_gradients

    @property
    def shards(self) -> bool:
        """Whether each rank has a part of every parameter."""
        return self.processes > 1 and self.kind.shards

    @property
    def for_unused_parameters(self) -> dict[str, Any]:
        """The settings that allow parameters to be unused in a step."""
        searches = "find_unused_parameters" in self.kind.Settings.model_fields
        return {self.backend: {"find_unused_parameters": True}} if searches else {}

    def open(self, **settings: Any) -> Strategy:
        """Start a strategy on a rank, by default in float64 and with a short timeout. Collective.

        It uses one thread: models are small, and threads that wait for one another on busy cores are far slower.

        Args:
            **settings: of ``unitrain.init``.
        """
        # float64 tells mistakes from rounding errors; the short timeout ends a duty that hangs.
        common = {"backend": self.backend, "precision": "fp64", "device": "cpu", "timeout_s": 30}
        strategy = unitrain.init(**{**common, **settings})
        torch.set_num_threads(1)
        return strategy

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 90) -> list[Any]:
        """Run ``fn(*args)`` on each rank of this world, and return the results.

        Args:
            fn: a function at the top level of a module, which may call ``open``.
            *args: its arguments.
            timeout: time limit in seconds.

        Raises:
            BaseException: the error of the first rank that failed; see ``run_ranks``.
        """
        return run_ranks(fn, *args, nprocs=self.processes, launcher=self.launcher, timeout=timeout)


def sees_world(backend: str, launcher: str, size: int, **settings: Any) -> bool:
    """Return whether a backend has the world size of a launcher on this host.

    Args:
        backend: the name of the backend.
        launcher: the name of the launcher.
        size: the number of processes that it starts.
        **settings: of the strategy; ``device`` is cpu by default.

    Raises:
        UnitrainError: the backend refuses the launcher or the settings.
    """
    launch = Launch(launcher, world_size=size, local_world_size=size)
    kind = load_backend(backend)
    if kind.expected_world(launch) != size:
        return False
    kind.check(unitrain.StrategyConfig(**{"backend": backend, "device": "cpu", **settings}), launch)
    return True


def find_worlds(backend: str, sizes: Sequence[int]) -> list[World]:
    """Return the worlds of a backend that can be started on this host, each with the first launcher that works.

    Args:
        backend: the name of the backend.
        sizes: numbers of processes.

    Raises:
        ConfigError: the backend refuses all of them.
        BackendError: its library is missing.
        LaunchError: it has another world size under every launcher found here.
    """
    kind = load_backend(backend)
    worlds: list[World] = []
    refusal: ConfigError | BackendError | None = None
    # spawn first: it starts ranks in a fraction of a second.
    several = ["spawn", *(name for name in local_launchers() if name != "python")]
    for size in sizes:
        for launcher in ["python"] if size == 1 else several:
            try:
                # Horovod, for one, does not see the ranks of unitrain.spawn.
                if sees_world(backend, launcher, size):
                    worlds.append(World(backend, size, launcher))
                    break
            except (ConfigError, BackendError) as error:
                refusal = refusal or error
    if not worlds:
        raise refusal or LaunchError(
            f"backend {backend!r} can't run on {', '.join(map(str, sizes))} processes under any launcher found here "
            f"({', '.join(['python', *several])}), according to its method `expected_world`. It works under: "
            f"{kind.served_by}."
        )
    return worlds
