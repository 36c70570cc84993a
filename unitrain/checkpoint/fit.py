"""Checks that a checkpoint belongs to this run, before any of it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from unitrain.checkpoint.store.manifest import Manifest
from unitrain.communication.streaming import Form
from unitrain.config import StrategyConfig
from unitrain.data import Loader
from unitrain.errors import CheckpointError

# Settings that must not change when a run is resumed. Launcher, backend, world size and timeouts may.
_TRAINING_SETTINGS = ("seed", "precision", "sync_batchnorm", "clip_norm", "clip_value", "compression")
# What schedulers of a cycle change beside the learning rate.
_CYCLED = ("momentum", "betas")


def changed_settings(
    manifest: Manifest, settings: StrategyConfig, config: Mapping[str, Any], objects: Mapping[str, Any]
) -> list[str]:
    """Return the settings that affect training and are not those of the checkpoint, with both values."""
    if not manifest.strategy:
        return []  # of another tool, which has none of them
    own = settings.model_dump(mode="json")
    # A loader's global batch does not depend on the number of micro-batches, and it compares that itself.
    loads = any(isinstance(value, Loader) for value in objects.values())
    compared = _TRAINING_SETTINGS if loads else (*_TRAINING_SETTINGS, "accumulate")
    pairs = [(f"strategy.{name}", manifest.strategy.get(name), own[name]) for name in compared]
    names = dict.fromkeys([*manifest.config, *config])
    pairs += [(name, manifest.config.get(name), config.get(name)) for name in names]
    return [f"{name} was {before!r} and is now {now!r}" for name, before, now in pairs if before != now]


def check_objects(
    objects: Mapping[str, Any], saved: Mapping[str, Any], state: Callable[[Any], Any], folder: str
) -> None:
    """Raise CheckpointError unless the outlines of saved states fit this run's objects. ``folder`` is for messages."""
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


def replaced_options(name: str, own: list[dict[str, Any]], saved: list[dict[str, Any]]) -> list[str]:
    """Return the options of an optimizer that a checkpoint replaces, with the saved value and the script's.

    What a scheduler changes is left out, since it differs from the first value in any case.
    """
    replaced = []
    for ours, theirs in zip(own, saved, strict=True):
        changing = {"params", *(["lr"] if "initial_lr" in ours else []), *(_CYCLED if "max_momentum" in ours else [])}
        for key in ours.keys() & theirs.keys() - changing:
            before, now = theirs[key], ours[key]
            if not isinstance(before, (Tensor, Form)) and not isinstance(now, Tensor) and before != now:
                replaced.append(f"{name}'s {key} is {before!r}, not {now!r}")
    return sorted(set(replaced))


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
