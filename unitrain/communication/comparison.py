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
    values = {name: repr(value) for name, value in facts.items()}
    expected = communicator.broadcast_data(values)
    differing = next((name for name in {**expected, **values} if expected.get(name) != values.get(name)), None)
    # Several facts may differ, and all ranks must name the same one.
    name = next(name for name in communicator.all_gather_data(differing) if name is not None)
    return name, by_rank(enumerate(communicator.all_gather_data(str(facts.get(name, "missing")))))


def first_reason(communicator: Communicator, *whys: str) -> str:
    """Return the reason of the first rank that has one; "" if none has. Collective."""
    return next(filter(None, communicator.all_gather_data(next(filter(None, whys), ""))), "")
