"""The handshake: after the rendezvous, the ranks compare settings, versions and code before any work."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from unitrain.communication.backend import Backend
from unitrain.communication.communicator import Communicator
from unitrain.config import Section, StrategyConfig, flattened
from unitrain.errors import ConfigError, by_rank
from unitrain.job.watch.hub import Member
from unitrain.process import start_time

# Settings that may differ between ranks.
_OWN_SETTINGS = frozenset({"device", "threads_per_process", "pin_memory"})


def handshake(communicator: Communicator, config: StrategyConfig, backend: type[Backend]) -> list[Member]:
    """Check that all ranks run the same thing, and return all processes of the job, by rank. Collective."""
    found = difference_between_ranks(communicator, _facts(config, backend))
    if found is not None:
        name, values = found
        if name.split(".")[0] in type(config).model_fields:
            hint = "Give all ranks the same environment variables, arguments and configuration file"
        else:
            hint = "Install and start the same version on every host"
        raise ConfigError(f"the ranks do not run the same: {name} is {values}. {hint}.")
    own = (socket.gethostname(), os.getpid(), start_time(os.getpid()))
    return [Member(rank, *process) for rank, process in enumerate(communicator.all_gather_data(own))]


def _facts(config: StrategyConfig, backend: type[Backend]) -> dict[str, Any]:
    """Return what must be the same on all ranks, by the name that the error message uses."""
    # The section of another backend is missing on hosts where that backend is not installed.
    common = {*StrategyConfig.model_fields, backend.name}
    others = {name for name, value in config if isinstance(value, Section) and name not in common}
    settings = config.model_dump(mode="json", exclude={*_OWN_SETTINGS, *others})
    script = Path(sys.argv[0]) if sys.argv else Path()
    backend_file = Path(str(sys.modules[backend.__module__].__file__))
    return {
        **flattened(settings),
        "UniTrain": version("unitrain"),
        "torch": str(torch.__version__),
        **backend.versions(),
        "the code of UniTrain": _digest(*sorted(Path(__file__).parents[1].rglob("*.py")), backend_file),
        f"the script {script.name}": _digest(script) if script.is_file() else None,
    }


def _digest(*files: Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def are_identical(communicator: Communicator, facts: Mapping[str, Any]) -> bool:
    """Return whether all ranks have the same facts, by their digests. Collective."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
    digests = communicator.all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
    return bool((digests == digests[0]).all())


def difference_between_ranks(communicator: Communicator, facts: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a name whose values differ between ranks, and the values with their ranks; None if all agree. Collective.

    Digests are compared first. The name is the first in which the first rank that has others differs from rank 0.
    """
    if are_identical(communicator, facts):
        return None
    exact = {name: repr(value) for name, value in facts.items()}
    expected = communicator.broadcast_data(exact)
    own = next((name for name in {**expected, **exact} if expected.get(name) != exact.get(name)), None)
    name = next(name for name in communicator.all_gather_data(own) if name is not None)
    return name, by_rank(enumerate(communicator.all_gather_data(str(facts.get(name, "missing")))))
