"""UniTrain: one PyTorch training script, unchanged and with the same result, on every backend and launcher."""

from unitrain.config import StrategyConfig
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
from unitrain.launching.launch import Launch
from unitrain.launching.spawning import spawn
from unitrain.stopping import Stopped
from unitrain.strategy import Strategy
from unitrain.training.metrics import Meter
from unitrain.training.step import StepResult

__all__ = [
    "BackendError",
    "CheckpointError",
    "CommunicationError",
    "ConfigError",
    "DataError",
    "Launch",
    "LaunchError",
    "Loader",
    "Meter",
    "NonFiniteError",
    "StepResult",
    "Stopped",
    "Strategy",
    "StrategyConfig",
    "UnitrainError",
    "UsageError",
    "init",
    "spawn",
]
