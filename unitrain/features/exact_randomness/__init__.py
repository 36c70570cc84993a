"""Random numbers of a forward that belong to the samples, equal on any number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unitrain.config import Section, StrategyConfig
from unitrain.errors import ConfigError
from unitrain.features import Exclusion

if TYPE_CHECKING:
    from unitrain.communication.backend import Backend
    from unitrain.training.feature import Feature

SETTING = "exact_randomness"
EXCLUDES = (
    Exclusion("compile", "compiled code draws its own random numbers"),
    Exclusion("compression", "powersgd is lossy, and draws random numbers itself", ("powersgd",)),
)


class Settings(Section):
    """The setting that this feature adds to a run."""

    exact_randomness: bool = False
    """Draw a sample's random numbers in a forward (dropout) by its place in the epoch, equal on any number of ranks."""


def check(config: StrategyConfig, backend: type[Backend]) -> None:
    """Refuse a backend that splits a process's batches over several devices."""
    devices = backend.replicas(config)
    if devices > 1:
        raise ConfigError(
            f"exact_randomness is not supported by backend {backend.name} on {devices} devices: use backend ddp, one "
            f"process per GPU (torchrun --nproc-per-node {devices} ...)."
        )


def make(config: StrategyConfig) -> Feature:
    """Return the feature that replaces the random numbers that modules draw in their forwards."""
    from unitrain.features.exact_randomness.randomness import ExactRandomness

    return ExactRandomness()
