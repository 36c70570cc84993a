"""``OnGPU``: worlds whose ranks train on the device that the variable GPU_DEVICE names, and may share it.

NCCL refuses two ranks on one GPU: from 2.30 on unless a variable allows it, and before unless each rank says that it is
on a host of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ranks import horovodrun_environments

from unitrain import Strategy
from unitrain.testing.worlds import World

DEVICE = os.environ.get("GPU_DEVICE", "cuda:0")


class OnGPU(World):
    """A world whose ranks train on the device."""

    def open(self, **settings: Any) -> Strategy:
        """Start a strategy on the device."""
        return super().open(**{"device": DEVICE, **settings})

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """Run ``fn(*args)`` on each rank."""
        return super().run(shared_gpu, fn, args, timeout=timeout)


def world_of(backend: str, ranks: int) -> OnGPU:
    """Return the world of a backend with a number of ranks."""
    launchers: dict[str, Any] = {"horovod": horovodrun_environments}
    return OnGPU(backend, ranks, "python" if ranks == 1 else launchers.get(backend, "spawn"))


def shared_gpu(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a function on a rank that NCCL takes though another one uses the GPU."""
    rank = os.environ.get("RANK") or os.environ.get("HOROVOD_RANK") or "0"
    os.environ.update(NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_HOSTID=f"host{rank}")
    return fn(*args)
