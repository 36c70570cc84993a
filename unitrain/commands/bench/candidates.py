"""The candidates to measure: worlds that can be started on this host, and settings to tune."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from unitrain.commands.launchers import local_launchers
from unitrain.commands.verify.worlds import World, find_worlds
from unitrain.settings.schema import variable

LEVERS: dict[str, tuple[object, ...]] = {
    "ddp.static_graph": (True,),
    "ddp.bucket_cap_mb": (1.0, 100.0),
    "horovod.cycle_time_ms": (0.5, 2.0),
    "horovod.fusion_threshold_mb": (8.0, 256.0),
    "threads_per_process": (),
}
"""Settings that affect speed but not the result, and the values to try; those of threads depend on the world."""


@dataclass(frozen=True)
class Candidate:
    """A world, and settings that differ from those of the recipe."""

    world: World
    settings: tuple[tuple[str, object], ...] = ()
    """Settings of the strategy, by dotted name."""

    def with_setting(self, name: str, value: object) -> Candidate:
        """Return the candidate with a setting added or replaced."""
        return replace(self, settings=(*((n, v) for n, v in self.settings if n != name), (name, value)))

    def variables(self) -> dict[str, str]:
        """Return the environment variables with which the recipe runs as this candidate."""
        settings = (("backend", self.world.backend), *self.settings)
        return {variable(name.split(".")): str(value).lower() for name, value in settings}

    def __str__(self) -> str:
        return ", ".join([f"{self.world}: {self.world.backend}", *(f"{name} {value}" for name, value in self.settings)])


def worlds_to_measure(backends: Sequence[str], most: int | None) -> list[World]:
    """Return the worlds of 2, 4, 8, ..., ``most`` processes that can be started here, smallest first.

    None means the number of GPUs of this host, or of cores if there are none.
    """
    most = most or torch.cuda.device_count() or len(os.sched_getaffinity(0))
    sizes = sorted({*(2**i for i in range(1, most.bit_length()) if 2**i <= most), most} - {1})
    found = find_worlds(backends, {launcher: sizes for launcher in local_launchers() if launcher != "python"})
    return sorted(found, key=lambda world: world.size)


def levers_of(world: World, names: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield the settings among ``names`` that have an effect in a world, with each value to try."""
    share = max(1, len(os.sched_getaffinity(0)) // world.size)
    threads = sorted({1, share} | ({2 * share} if world.size > 1 else set()))
    for name in names:
        section = name.rpartition(".")[0]
        if not section or (section == world.backend and world.size > 1):
            for value in LEVERS[name] or threads:
                yield name, value
