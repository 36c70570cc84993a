"""Trains, saves and resumes where the system lacks what Linux has: /proc, /dev/shm, prctl, memfd, core bindings.

Started as ``without_linux.py FOLDER``, in one process, or as a rank by its variables. What torch and psutil read of the
system is left to them: they have versions for other systems.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # noqa: F401
import torch
import torch.distributed
from torch.utils.data import TensorDataset


def _absent(name: object) -> bool:
    return str(name).startswith(("/proc", "/dev/shm"))


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if (
            args
            and _absent(args[0])
            and sys._getframe(1).f_globals["__name__"].split(".")[0] not in ("psutil", "torch")
        ):
            raise FileNotFoundError(errno.ENOENT, "absent", str(args[0]))
        return function(*args, **kwargs)

    return guarded


for place, names in ((os, ("listdir", "readlink")), (Path, ("read_text", "read_bytes", "iterdir", "stat"))):
    for name in names:
        setattr(place, name, _guarded(getattr(place, name)))
for name in ("sched_getaffinity", "memfd_create", "pidfd_open"):
    delattr(os, name)


_CDLL = ctypes.CDLL


class _Library:
    """A library, or the C library, without functions that only Linux and glibc have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._library = _CDLL(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("prctl", "mallopt", "malloc_trim"):
            raise AttributeError(name)
        return getattr(self._library, name)


ctypes.CDLL = _Library  # type: ignore[assignment,misc]
sys.platform = "darwin"

import unitrain  # noqa: E402
from unitrain.features.throughput import Throughput  # noqa: E402
from unitrain.process import print_stacks  # noqa: E402

with unitrain.init(device="cpu") as strategy:
    model = torch.nn.Linear(4, 1)
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = strategy.dataloader(TensorDataset(torch.ones(8, 4)), global_batch_size=4, num_workers=1)
    checkpoint = strategy.checkpoint(sys.argv[1], model=model, optimizer=optimizer, loader=loader)
    resumed = checkpoint.resume()
    throughput = strategy.add(Throughput())
    for _ in loader.epochs(2 if resumed else 1):
        for (rows,) in loader:
            strategy.step(model(rows).mean(), optimizer)
        checkpoint.save()
    assert throughput.read()["peak_memory_mb"] < 10  # Linux tells KiB, which are taken for bytes, as of macOS
    print_stacks("stacks:")
    strategy.on_main(lambda: print(f"{strategy.config.backend} {strategy.world_size} resumed {resumed}"))
