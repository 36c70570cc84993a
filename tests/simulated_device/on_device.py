"""``run``: runs a function on ranks that have the simulated device. pytest's own process must not have it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import simulated_device
import torch
from ranks import run_ranks

NEEDS_COMPILER = pytest.mark.skipif(
    simulated_device.compiler() is None, reason="there is no C++ compiler to build the simulated device (set CXX)"
)


class _Sim:
    def __getattr__(self, name: str) -> Any:
        return getattr(torch.get_device_module("sim"), name)


sim: Any = _Sim()
"""``torch.sim``, for ranks: pytest's own process, which imports the tests, does not have it."""


def run(
    fn: Callable[..., Any], *args: Any, nprocs: int = 1, timeout: float = 60, fresh: bool = False, **device: Any
) -> list[Any]:
    """Run ``fn(*args)`` on each of ``nprocs`` ranks, and return the results.

    Args:
        fn: a function at the top level of a module.
        *args: its arguments.
        nprocs: number of ranks; one has no launcher.
        timeout: time limit in seconds.
        fresh: whether the ranks must be new processes, because the function limits or measures the device's memory.
        **device: what ``simulated_device.load`` takes.
    """
    simulated_device.build()
    launcher: Any = "python" if nprocs == 1 else "spawn"
    settings = " ".join(f"{name}={value}" for name, value in sorted(device.items()))
    more: dict[str, Any] = {"fresh": fresh, "world": f"on the simulated device {settings}"}
    return run_ranks(_rank, fn, args, device, nprocs=nprocs, timeout=timeout, launcher=launcher, **more)


def environment(**device: Any) -> dict[str, str]:
    """Return what gives a program's processes the device when they import torch."""
    simulated_device.build()
    folder = simulated_device.FOLDER
    paths = [str(folder), str(folder / "autoload"), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = ",".join(f"{name}={value}" for name, value in device.items())
    return {"PYTHONPATH": os.pathsep.join(paths), "SIMULATED_DEVICE": settings}


def _rank(fn: Callable[..., Any], args: tuple[Any, ...], device: dict[str, Any]) -> Any:
    if not simulated_device.is_loaded():
        simulated_device.load(**device)
    result = fn(*args)
    sim.set_device(0)
    return result
