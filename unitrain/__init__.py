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
    from unitrain.communication.backend import Backend
    from unitrain.communication.batch_group import BatchGroup
    from unitrain.config import Section
    from unitrain.data import Loader
    from unitrain.errors import (
        BackendError,
        CheckpointError,
        CommunicationError,
        ConfigError,
        DataError,
        LaunchError,
        NonFiniteError,
        UnitrainError,
        UsageError,
    )
    from unitrain.initialize import init
    from unitrain.job.starting.spawn import spawn
    from unitrain.job.watch.stopping import Stopped
    from unitrain.launch.detect import Launch
    from unitrain.settings import dump_yaml, parse_command_line
    from unitrain.settings.strategy_config import StrategyConfig
    from unitrain.strategy import Strategy
    from unitrain.training.feature import Feature
    from unitrain.training.loop.step import StepResult
    from unitrain.training.meter import Meter
    from unitrain.training.models.passes import ModulePass

__all__ = [
    "Backend",
    "BackendError",
    "BatchGroup",
    "CheckpointError",
    "CommunicationError",
    "ConfigError",
    "DataError",
    "Feature",
    "Launch",
    "LaunchError",
    "Loader",
    "Meter",
    "ModulePass",
    "NonFiniteError",
    "Section",
    "StepResult",
    "Stopped",
    "Strategy",
    "StrategyConfig",
    "UnitrainError",
    "UsageError",
    "dump_yaml",
    "init",
    "parse_command_line",
    "spawn",
]

_HOMES = {
    "Backend": "communication.backend",
    "BatchGroup": "communication.batch_group",
    "Section": "config",
    "StrategyConfig": "settings.strategy_config",
    "dump_yaml": "settings",
    "parse_command_line": "settings",
    "Loader": "data",
    "Feature": "training.feature",
    "init": "initialize",
    "Launch": "launch.detect",
    "spawn": "job.starting.spawn",
    "Stopped": "job.watch.stopping",
    "Strategy": "strategy",
    "Meter": "training.meter",
    "ModulePass": "training.models.passes",
    "StepResult": "training.loop.step",
}


if not TYPE_CHECKING:  # otherwise a type checker would accept any misspelled name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return import_module("importlib.metadata").version("unitrain")
        home = _HOMES.get(name, "errors") if name in __all__ else _home_in_features(name)
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
    return __all__
