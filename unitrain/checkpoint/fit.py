"""Checks that a checkpoint belongs to this run, before any of it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from unitrain.checkpoint.manifest import Manifest
from unitrain.config import StrategyConfig
from unitrain.errors import CheckpointError
from unitrain.training.streaming import Form

# Settings that must not change when a run is resumed. Launcher, backend, world size and timeouts may.
_TRAINING_SETTINGS = ("seed", "precision", "sync_batchnorm", "accumulate", "clip_norm", "clip_value", "compression")


def check_settings(manifest: Manifest, settings: StrategyConfig, config: Mapping[str, Any], folder: Path) -> None:
    """Check that settings that affect training are those of the checkpoint.

    Raises:
        CheckpointError: some have changed; all of them are named.
    """
    own = settings.model_dump(mode="json")
    pairs = [(f"strategy.{name}", manifest.strategy.get(name), own[name]) for name in _TRAINING_SETTINGS]
    names = dict.fromkeys([*manifest.config, *config])
    pairs += [(name, manifest.config.get(name), config.get(name)) for name in names]
    changed = [f"{name} was {before!r} and is now {now!r}" for name, before, now in pairs if before != now]
    if changed:
        raise CheckpointError(
            f"the run in {folder} was trained with other settings: {'; '.join(changed)}. Use the same settings, or "
            "resume(force=True), or start a new run in another folder. Nothing was loaded."
        )


def check_objects(
    objects: Mapping[str, Any], saved: Mapping[str, Any], state: Callable[[Any], Any], folder: Path
) -> None:
    """Check that the outlines of saved states fit this run's objects.

    Args:
        objects: this run's, by name.
        saved: the outlines, by name.
        state: returns the state of an object.
        folder: of the checkpoint.

    Raises:
        CheckpointError: names, shapes, dtypes or parameter groups differ.
    """
    if set(objects) != set(saved):
        raise CheckpointError(
            f"the checkpoint in {folder} contains {', '.join(sorted(saved))}, but this run has "
            f"{', '.join(sorted(objects))}: pass the same objects to strategy.checkpoint. Nothing was loaded."
        )
    for name, value in objects.items():
        if isinstance(value, (nn.Module, Optimizer)) and not isinstance(saved[name], dict):
            raise CheckpointError(
                f"{name} in the checkpoint in {folder} is a {type(saved[name]).__name__}, and no state. Nothing was "
                "loaded."
            )
        if isinstance(value, nn.Module):
            _compare_tensors(name, state(value), saved[name])
        elif isinstance(value, Optimizer):
            _compare_groups(name, value.param_groups, saved[name].get("param_groups", []))


def _compare_groups(name: str, own: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    ours, theirs = ([len(group.get("params", [])) for group in groups] for groups in (own, saved))
    if ours != theirs:
        raise CheckpointError(
            f"{name} has parameter groups of {theirs} parameters in the checkpoint, but of {ours} in this run. Nothing "
            "was loaded."
        )


def _compare_tensors(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    for key in [*ours, *(k for k in theirs if k not in ours)]:
        mine, other = (_shape(state.get(key)) for state in (ours, theirs))
        if mine != other:
            raise CheckpointError(
                f"the checkpoint belongs to another {name}: {key} is {other} in the checkpoint, but {mine} in this "
                "run. Nothing was loaded."
            )


def _shape(value: Any) -> str:
    if isinstance(value, (Tensor, Form)):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "missing" if value is None else type(value).__name__
