"""Puts this package in the place of the modules that Horovod scripts import."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

_FOLDER = str(Path(__file__).parents[1])  # `unitrain horovod` puts it on the path, also of child processes
_OF_TORCH = ("mpi_ops", "compression", "elastic", "elastic.sampler", "elastic.state")
_NAMES = ("torch", *(f"torch.{name}" for name in _OF_TORCH), "common", "common.exceptions", "common.process_sets")
_installed: dict[str, ModuleType] = {}
_real: dict[str, ModuleType] = {}


def install() -> None:
    """Have ``import horovod.torch``, and the like, import this package in this process."""
    from unitrain.compat import horovod as package

    vars(package).update(torch=package, common=package, __version__="0.28.1")
    _installed["horovod"] = package
    _installed.update({f"horovod.{name}": package.elastic if "elastic" in name else package for name in _NAMES})
    sys.modules.update(_installed)


@contextmanager
def real_horovod() -> Iterator[None]:
    """Have the same imports import Horovod, where the backend of that name needs it."""
    path = sys.path[:]
    sys.path[:] = [folder for folder in path if folder != _FOLDER]
    for name in _installed:
        sys.modules.pop(name, None)
    sys.modules.update(_real)
    try:
        yield
    finally:
        sys.path[:] = path
        _real.update({name: module for name, module in sys.modules.items() if f"{name}.".startswith("horovod.")})
        sys.modules.update(_installed)
