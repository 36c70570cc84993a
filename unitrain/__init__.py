"""UniTrain: one PyTorch training script, unchanged and with the same result, on every backend and launcher.

The names below are imported on first use: ``unitrain --help`` does not need torch, and importing torch takes seconds.
"""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unitrain.communication.backend import Backend as Backend
    from unitrain.communication.batch_group import BatchGroup as BatchGroup
    from unitrain.config import Section as Section
    from unitrain.data import Loader as Loader
    from unitrain.errors import BackendError as BackendError
    from unitrain.errors import CheckpointError as CheckpointError
    from unitrain.errors import CommunicationError as CommunicationError
    from unitrain.errors import ConfigError as ConfigError
    from unitrain.errors import DataError as DataError
    from unitrain.errors import LaunchError as LaunchError
    from unitrain.errors import NonFiniteError as NonFiniteError
    from unitrain.errors import UnitrainError as UnitrainError
    from unitrain.errors import UsageError as UsageError
    from unitrain.initialize import init as init
    from unitrain.job.starting.spawn import spawn as spawn
    from unitrain.job.watch.stopping import Stopped as Stopped
    from unitrain.launch.detect import Launch as Launch
    from unitrain.settings import dump_yaml as dump_yaml
    from unitrain.settings import parse_command_line as parse_command_line
    from unitrain.settings.strategy_config import StrategyConfig as StrategyConfig
    from unitrain.strategy import Strategy as Strategy
    from unitrain.training.feature import Feature as Feature
    from unitrain.training.loop.step import StepResult as StepResult
    from unitrain.training.meter import Meter as Meter
    from unitrain.training.models.passes import ModulePass as ModulePass

# The module that each public name is in.
_HOMES = {
    "Backend": "communication.backend",
    "BackendError": "errors",
    "BatchGroup": "communication.batch_group",
    "CheckpointError": "errors",
    "CommunicationError": "errors",
    "ConfigError": "errors",
    "DataError": "errors",
    "Feature": "training.feature",
    "Launch": "launch.detect",
    "LaunchError": "errors",
    "Loader": "data",
    "Meter": "training.meter",
    "ModulePass": "training.models.passes",
    "NonFiniteError": "errors",
    "Section": "config",
    "StepResult": "training.loop.step",
    "Stopped": "job.watch.stopping",
    "Strategy": "strategy",
    "StrategyConfig": "settings.strategy_config",
    "UnitrainError": "errors",
    "UsageError": "errors",
    "dump_yaml": "settings",
    "init": "initialize",
    "parse_command_line": "settings",
    "spawn": "job.starting.spawn",
}


if not TYPE_CHECKING:  # otherwise a type checker would accept any misspelled name
    __all__ = list(_HOMES)

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return import_module("importlib.metadata").version("unitrain")
        home = _HOMES.get(name) or _home_in_features(name)
        if not home:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with _without_collections():
            value = getattr(import_module(f"unitrain.{home}"), name)
        globals()[name] = value  # later accesses skip this function
        return value


def _home_in_features(name: str) -> str:
    """Return the module of a function of a feature, which is in a file of its name; "" if there is no such function."""
    if name.isidentifier() and "_" in name.strip("_"):  # not a folder's name, as in "from unitrain import features"
        for file in Path(__file__).parent.glob(f"features/*/{name}.py"):
            return f"features.{file.parent.name}.{name}"
    return ""


@cache
def _freeze_once() -> None:
    gc.freeze()  # gc.get_freeze_count(), to find out whether it was done, takes 15 ms
    atexit.register(gc.unfreeze)  # else libraries that count their objects at the end report leaks, as triton's does


@contextmanager
def _without_collections() -> Iterator[None]:
    """Import without collecting garbage, and exempt all objects of the first import from later collections.

    torch's modules are hundreds of thousands of objects that stay. While a rank looks through them, 0.1 s, all wait.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _freeze_once()
        if enabled:
            gc.enable()


def __dir__() -> list[str]:
    return list(_HOMES)
