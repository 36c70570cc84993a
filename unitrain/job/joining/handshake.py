"""The handshake: after the rendezvous, the ranks compare settings, versions and code before any work."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from unitrain.communication.backend import Backend
from unitrain.communication.communicator import Communicator
from unitrain.communication.comparison import difference_between_ranks
from unitrain.config import StrategyConfig, flattened
from unitrain.errors import ConfigError
from unitrain.job.watch.hub import Member
from unitrain.process import start_time

# Settings that may differ between ranks: hosts may have other devices, and memory that can't be pinned.
_OWN_SETTINGS = frozenset({"device", "pin_memory"})


def handshake(communicator: Communicator, config: StrategyConfig, backend: type[Backend]) -> list[Member]:
    """Check that all ranks run the same thing, and return all processes of the job, by rank. Collective.

    Args:
        communicator: connects the ranks.
        config: the resolved settings of this rank.
        backend: the class of the backend.

    Raises:
        ConfigError: a setting, a version, the code of UniTrain or the script differs between ranks. It is raised on
            all.
    """
    difference = difference_between_ranks(communicator, _facts(config, backend))
    if difference is not None:
        name, values = difference
        if name.split(".")[0] in type(config).model_fields:
            hint = "Give all ranks the same environment variables, arguments and configuration file"
        else:
            hint = "Install and start the same version on every host"
        raise ConfigError(f"the ranks do not run the same: {name} is {values}. {hint}.")
    # A pid may be reused, so it takes the time of the start to tell a process.
    process = (socket.gethostname(), os.getpid(), start_time(os.getpid()))
    return [Member(rank, *fields) for rank, fields in enumerate(communicator.all_gather_data(process))]


def _facts(config: StrategyConfig, backend: type[Backend]) -> dict[str, Any]:
    """Return the facts that must be the same on all ranks, by the names that the error message uses."""
    # The section of another backend is missing on hosts where that backend is not installed.
    others = config.sections_of_others(backend.name)
    settings = config.model_dump(mode="json", exclude={*_OWN_SETTINGS, *others})
    script = Path(sys.argv[0]) if sys.argv else Path()
    package, backend_file = (Path(str(sys.modules[name].__file__)) for name in ("unitrain", backend.__module__))
    return {
        **flattened(settings),
        "UniTrain": version("unitrain"),
        "torch": str(torch.__version__),
        **backend.versions(),
        # Versions do not tell a checkout that was changed on some hosts only. Digests of the files do.
        "the code of UniTrain": _digest(*sorted(package.parent.rglob("*.py")), backend_file),
        # Nothing to compare where Python runs a command line (-c), or reads from a terminal.
        f"the script {script.name}": _digest(script) if script.is_file() else None,
    }


def _digest(*files: Path) -> str:
    """Return the first 12 hexadecimal digits of the SHA-256 of files, read in this order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
