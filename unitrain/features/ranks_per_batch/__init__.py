"""Groups of ranks that get the same batches, and compute with parts of each sample: context or domain parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from unitrain.config import Section, StrategyConfig
from unitrain.features import Exclusion

if TYPE_CHECKING:
    from unitrain.communication.backend import Backend
    from unitrain.training.feature import Feature

SETTING = "ranks_per_batch"
EXCLUDES = (
    Exclusion("shares", "ranks that share a batch have the same samples"),
    Exclusion("local_sgd.steps", "ranks that have parts of one sample can't train apart"),
    Exclusion("exact_randomness", "it draws random numbers for whole samples, and a rank has parts of them"),
)


class Settings(Section):
    """The setting that this feature adds to a run."""

    ranks_per_batch: Annotated[int, Field(ge=1)] = 1
    """Ranks that get the same batches and compute with parts of each sample (context or domain parallelism)."""


def check(config: StrategyConfig, backend: type[Backend]) -> None:
    """Refuse a backend that can't communicate in groups."""
    backend.allow_parts()


def make(config: StrategyConfig) -> Feature:
    """Return the feature that divides the ranks into groups."""
    from unitrain.features.ranks_per_batch.groups import SharedBatches

    return SharedBatches(Settings.of(config).ranks_per_batch)
