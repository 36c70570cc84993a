"""UniTrain's exceptions.

    UnitrainError            base class
    ├── ConfigError          a setting is wrong (exit code 2)
    ├── LaunchError          the processes were not started as the run needs them (exit code 2)
    ├── BackendError         a backend or its library is missing, or does not work as it must
    ├── DataError            a dataset, a sampler or a batch can't be used
    ├── UsageError           a call that is not allowed, or not at this point
    ├── CheckpointError      a checkpoint can't be written, found, read or applied
    ├── CommunicationError   a collective failed, or the ranks' calls or models differ
    └── NonFiniteError       a loss or a gradient is NaN or infinite

A message says what is wrong, why, and what to do. Errors of other libraries are converted to these if a user can act
on them, and are not caught otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice


class UnitrainError(Exception):
    """Base class of UniTrain's exceptions.

    ``exit_code`` is the exit code of the process if the exception is not caught.
    """

    exit_code = 1


class ConfigError(UnitrainError):
    """A setting is unknown, malformed, out of range, or not supported in this run."""

    exit_code = 2


class LaunchError(UnitrainError):
    """The launcher's variables are missing or wrong, or don't describe the world that the backend would have.

    Args:
        message: the message.
        on_all_ranks: whether rank 0 prints the same, so that this rank need not. Of an error that only some hosts have,
            one rank of each host prints the message.
    """

    exit_code = 2

    def __init__(self, message: str, *, on_all_ranks: bool = True) -> None:
        super().__init__(message)
        self.on_all_ranks = on_all_ranks


class BackendError(UnitrainError):
    """A backend can't be imported, its library is missing, or it does not work as it must."""


class DataError(UnitrainError):
    """A dataset, a sampler or a batch can't be used."""


class UsageError(UnitrainError):
    """A call that is not allowed, or not at this point."""


class CheckpointError(UnitrainError):
    """A checkpoint or a saved state can't be written, found, read or applied."""


class CommunicationError(UnitrainError):
    """A collective failed because of another rank, or the ranks' calls or models differ."""


class NonFiniteError(UnitrainError):
    """A loss or a gradient is NaN or infinite, on any rank."""

    # Supervisors do not restart a run that would diverge again.
    exit_code = 3


@contextmanager
def writing(what: object, kind: type[UnitrainError] = UsageError) -> Iterator[None]:
    """Raise an error of writing a file or making a folder as one with its path, the reason and a remedy."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what} can't be written: {error}. Correct that, or use another folder.") from error


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` with the valid name closest to ``name``, or an empty string if none is close."""
    match = get_close_matches(name, list(valid), n=1)
    return f" Did you mean {match[0]!r}?" if match else ""


# A message that lists thousands of ranks is not read.
_MOST_VALUES = 4


def by_rank(values: Iterable[tuple[int, object]]) -> str:
    """Return ranks and their values as text for a message: each value with its ranks, and not more than four values."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values:
        ranks.setdefault(str(value), []).append(rank)
    shown = [f"{value} on rank {listed(holders)}" for value, holders in islice(ranks.items(), _MOST_VALUES)]
    if len(ranks) > len(shown):
        shown.append(f"{len(ranks) - len(shown)} other values on the others")
    return "; ".join(shown)


def listed(ranks: Sequence[int]) -> str:
    """Return ranks as text for a message: the first eight of them."""
    return f"{', '.join(map(str, ranks[:8]))}{' ...' if len(ranks) > 8 else ''}"
