"""Computes the activations of blocks again in the backward, to save memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from unitrain.config import Section, StrategyConfig

if TYPE_CHECKING:
    from unitrain.training.feature import Feature

SETTING = "activation_checkpointing"


class Settings(Section):
    """The setting that this feature adds to a run."""

    activation_checkpointing: Annotated[
        bool | tuple[str, ...], Field(json_schema_extra={"allowed": "true, false or names of classes"})
    ] = False
    """Compute activations of these classes of modules again in the backward, to save memory; true: of all blocks."""


def make(config: StrategyConfig) -> Feature:
    """Return the feature that checkpoints the blocks of modules that are prepared."""
    from unitrain.features.activation_checkpointing.checkpointing import ActivationCheckpointing

    return ActivationCheckpointing(Settings.of(config).activation_checkpointing)
