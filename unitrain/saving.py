"""One file, written and read by rank 0 for all."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from torch import nn

from unitrain.errors import CheckpointError

if TYPE_CHECKING:
    from unitrain.strategy import Strategy


def save(strategy: Strategy, value: Any, path: Path) -> None:
    """See ``Strategy.save``."""
    failure = None
    if strategy.is_main:
        try:
            _write(_states(strategy, value), path)
        except Exception as error:  # what can't be pickled raises whatever it likes
            failure = f"{path} could not be written: {error}"
    failure = strategy.broadcast_object(failure)
    if failure:
        raise CheckpointError(failure)


def load(strategy: Strategy, path: Path) -> Any:
    """See ``Strategy.load``."""
    result: tuple[Any, str | None] = (None, None)
    if strategy.is_main:
        try:
            result = (torch.load(path, map_location="cpu", weights_only=True), None)
        except FileNotFoundError:
            result = (None, f"{path} does not exist.")
        except pickle.UnpicklingError as error:
            result = (None, f"{path} is no file of tensors and plain data, or holds code, which is never run: {error}")
        except Exception as error:  # a broken file makes torch's reader raise errors of many kinds
            result = (None, f"{path} could not be read: {error}")
    value, failure = strategy.broadcast_object(result)
    if failure:
        raise CheckpointError(failure)
    return value


def _states(strategy: Strategy, value: Any) -> Any:
    """Replace what has a state by its state, keys without the prefixes of wrappers."""
    if isinstance(value, nn.Module):
        return strategy.unwrap(value).state_dict()
    if callable(getattr(value, "state_dict", None)):
        return value.state_dict()
    if isinstance(value, dict):
        return {key: _states(strategy, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_states(strategy, item) for item in value)
    return value


def _write(value: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
