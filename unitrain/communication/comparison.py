"""Compares facts between ranks: by a digest, and only if it differs, by their values. Shares reasons to refuse."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from unitrain.communication.communicator import Communicator
from unitrain.errors import by_rank


def are_identical(communicator: Communicator, facts: Mapping[str, Any]) -> bool:
    """Return whether all ranks have the same facts, by their digests. Collective.

    Args:
        communicator: the communicator of this process.
        facts: plain data, by name.
    """
    # Sorted, since a dict may have another order on another rank.
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
    digests = communicator.all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
    return bool((digests == digests[0]).all())


def difference_between_ranks(communicator: Communicator, facts: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a name with values that differ between ranks, and these with their ranks; None if all agree. Collective.

    Digests are compared first. The name is the first in which the first rank that has others differs from rank 0.

    Args:
        communicator: the communicator of this process.
        facts: plain data, by the names that an error message uses.
    """
    if are_identical(communicator, facts):
        return None
    every = communicator.all_gather_data({name: (repr(fact), str(fact)) for name, fact in facts.items()})
    first, *others = every
    name = next(name for those in others for name in {**first, **those} if first.get(name) != those.get(name))
    return name, by_rank((rank, those[name][1] if name in those else "missing") for rank, those in enumerate(every))


def first_reason(communicator: Communicator, *whys: str) -> str:
    """Return the reason of the first rank that has one; "" if none has. Collective."""
    return next(filter(None, communicator.all_gather_data(next(filter(None, whys), ""))), "")
