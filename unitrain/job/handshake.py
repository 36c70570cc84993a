"""What the ranks tell one another before any work: who they are, and that they are about to run the same thing."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from unitrain.backend import Backend
from unitrain.communicator import Communicator
from unitrain.config import Section, StrategyConfig
from unitrain.errors import ConfigError
from unitrain.job.hub import Member

# What each process may have to itself.
_OWN_SETTINGS = frozenset({"device", "threads_per_process", "pin_memory"})


def introduce(communicator: Communicator, config: StrategyConfig, backend: type[Backend]) -> list[Member]:
    """Return all processes of the job, by rank. Collective.

    Args:
        communicator: of this process.
        config: its settings.
        backend: the backend's class.

    Raises:
        ConfigError: the ranks have other settings, other versions or other code; on every rank, naming what differs.
    """
    own = (socket.gethostname(), os.getpid(), psutil.Process().create_time(), _facts(config, backend))
    told = communicator.all_gather_object(own)
    _check_alike([facts for *_, facts in told], set(type(config).model_fields))
    return [Member(rank, host, pid, created) for rank, (host, pid, created, _) in enumerate(told)]


def _facts(config: StrategyConfig, backend: type[Backend]) -> dict[str, Any]:
    """Return what must be the same on all ranks, by the name that a message gives it."""
    # Another backend's section may be missing on a host, where that backend is not installed.
    others = {name for name, value in config if isinstance(value, Section) and name != backend.name}
    settings = config.model_dump(exclude={*_OWN_SETTINGS, *others})
    script = Path(sys.argv[0]) if sys.argv else Path()
    backend_file = Path(str(sys.modules[backend.__module__].__file__))
    return {
        **_flat(settings),
        "UniTrain": version("unitrain"),
        "torch": torch.__version__,
        **backend.versions(),
        "the code of UniTrain": _digest(*sorted(Path(__file__).parents[1].rglob("*.py")), backend_file),
        f"the script {script.name}": _digest(script) if script.is_file() else None,
    }


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat.update(_flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value})
    return flat


def _digest(*files: Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _check_alike(facts: list[dict[str, Any]], settings: Collection[str]) -> None:
    found = difference(facts)
    if found is None:
        return
    name, said = found
    if name.split(".")[0] in settings:
        hint = "Give all ranks the same (environment, arguments and files)"
    else:
        hint = "Install and start the same on every host"
    raise ConfigError(f"the ranks do not run the same: {name} is {said}. {hint}.")


def difference(facts: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """Return what is not the same on all ranks: the first name, and its values with the ranks that have them.

    Args:
        facts: what each rank says, by name.
    """
    for name in dict.fromkeys(name for one in facts for name in one):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, one in enumerate(facts):
            ranks_by_value.setdefault(repr(one.get(name)), []).append(rank)
        if len(ranks_by_value) > 1:
            return name, "; ".join(
                f"{value} on rank {', '.join(map(str, ranks[:8]))}{' ...' if len(ranks) > 8 else ''}"
                for value, ranks in ranks_by_value.items()
            )
    return None
