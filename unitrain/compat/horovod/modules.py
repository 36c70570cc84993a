"""Puts this package in the place of the modules that Horovod scripts import."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

_HERE = __name__.rpartition(".")[0]
_FOLDER = str(Path(__file__).parents[1])  # `unitrain horovod` puts it on the path, also of child processes
_ALL = ("torch", "torch.mpi_ops", "torch.compression", "common.exceptions", "common.process_sets")
_ELASTIC = ("torch.elastic", "torch.elastic.sampler", "torch.elastic.state")
_installed: dict[str, ModuleType] = {}
_real: dict[str, ModuleType] = {}


def install() -> None:
    """Have ``import horovod.torch``, and the like, import this package in this process."""
    for modules, source in ((_ALL, _HERE), (_ELASTIC, f"{_HERE}.elastic")):
        _installed.update({f"horovod.{name}": import_module(source) for name in modules})
    for name in ("horovod", "horovod.common"):
        _installed[name] = module_from_spec(ModuleSpec(name, None, is_package=True))
        _installed[name].__file__ = __file__  # as None, it makes inspect fail, when torch imports torch._dynamo
    package, common = _installed["horovod.torch"], _installed["horovod.common"]
    _installed["horovod"].__dict__.update(torch=package, common=common, __version__="0.28.1")
    common.__dict__.update(exceptions=package, process_sets=package)
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
        if _installed:
            _real.update({name: module for name, module in sys.modules.items() if f"{name}.".startswith("horovod.")})
            _installed["horovod"].__path__ = getattr(_real.get("horovod"), "__path__", [])
            sys.modules.update(_installed)
