"""pytest plugin with the options of ``pytest --pyargs unitrain.testing``.

pytest loads it in every run if UniTrain is installed: it imports nothing of it, and adds nothing to other tests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from unitrain.testing.worlds import World

WORLDS: pytest.StashKey[list[World]] = pytest.StashKey()
"""The worlds of the tested backend. Missing if other tests are run."""


def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: Sequence[str]) -> None:
    """Add options to ``pytest --pyargs unitrain.testing``."""
    # The option names are common. In other runs they belong to other plug-ins.
    if not any(argument.startswith("unitrain.testing") for argument in args):
        return
    early_config.stash[WORLDS] = []
    group = parser.getgroup("unitrain", "the contract of UniTrain's backends")
    group.addoption("--backend", metavar="NAME", help="name of the backend to test (its entry point)")
    group.addoption(
        "--processes",
        metavar="N",
        default="1,2,3",
        help="numbers of processes, comma-separated; those that the backend doesn't support are skipped "
        "(default: %(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Find the worlds of the backend."""
    # The tests have pytest-xdist's mark whether it is installed or not.
    config.addinivalue_line("markers", "xdist_group(name): tests to run in the same process of pytest-xdist")
    if WORLDS not in config.stash or config.option.help:
        return
    # Imported only now: other tests may want to set the environment before torch is imported.
    from unitrain import UnitrainError
    from unitrain.testing.worlds import find_worlds

    backend, processes = config.option.backend, config.option.processes
    if backend is None:
        raise pytest.UsageError(
            "--backend is missing. Name the backend to test: pytest --pyargs unitrain.testing --backend NAME"
        )
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", processes):
        raise pytest.UsageError(
            f"--processes is {processes!r}, but must be one or more positive ints, comma-separated, such as 1,2,4."
        )
    try:
        config.stash[WORLDS] = find_worlds(backend, [int(size) for size in processes.split(",")])
    except UnitrainError as error:
        raise pytest.UsageError(str(error)) from error
