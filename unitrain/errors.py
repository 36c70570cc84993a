"""UniTrain's errors, in one small tree.

    UnitrainError            everything that UniTrain raises on purpose
    ├── ConfigError          a setting is wrong (exit code 2)
    ├── LaunchError          the processes were not started as the run needs them (exit code 2)
    ├── BackendError         a backend or its engine is missing or can't do what was asked
    ├── DataError            a dataset, a sampler or a batch can't be used as given
    ├── UsageError           a call that the API does not allow, or not at this point
    ├── CheckpointError      a checkpoint can't be written, found, trusted or applied
    ├── CommunicationError   processes could not talk to one another, or said different things
    └── NonFiniteError       a loss or a gradient is NaN or infinite

A message says what is wrong, why, and what to do. Foreign errors are mapped to these where a user could act on
them; everything else passes through as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UnitrainError(Exception):
    """Base of every error that UniTrain raises on purpose.

    ``exit_code`` is the status a process ends with when nobody catches the error.
    """

    exit_code = 1


class ConfigError(UnitrainError):
    """A setting is unknown, malformed, out of range, or can't be honoured in this run."""

    exit_code = 2


class LaunchError(UnitrainError):
    """The launcher's environment is broken, or the world it made is not the one the backend would see."""

    exit_code = 2


class BackendError(UnitrainError):
    """A backend is unknown, its engine is missing, or it can't do what was asked of it."""


class DataError(UnitrainError):
    """A dataset, a sampler or a batch can't be used as given."""


class UsageError(UnitrainError):
    """A call that the API does not allow, or does not allow at this point."""


class CheckpointError(UnitrainError):
    """A checkpoint or a saved state can't be written, found, trusted or applied."""


class CommunicationError(UnitrainError):
    """Processes could not reach one another, or called collectives that do not match."""


class NonFiniteError(UnitrainError):
    """A loss or a gradient is NaN or infinite, on any rank."""

    exit_code = 3


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the valid name nearest to ``name``, or an empty string."""
    match = get_close_matches(name, list(valid), n=1)
    return f" Did you mean {match[0]!r}?" if match else ""
