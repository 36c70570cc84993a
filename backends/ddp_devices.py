"""Checks through the store, before any process group exists, whether ranks share GPUs, which NCCL refuses."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

# All ranks start their backends in the same order, so a count identifies a start. One store may serve several.
_starts = itertools.count()


def gpu_id(device: torch.device) -> str:
    """Return an identifier of a GPU that is unique over all hosts."""
    return str(torch.cuda.get_device_properties(device).uuid)


def any_shared(store: dist.Store, own: str, world_size: int) -> bool:
    """Return whether two ranks use the same device; the same on all ranks. Collective; O(1) calls on each rank.

    Args:
        store: a store that all ranks share.
        own: identifier of this rank's device.
        world_size: number of ranks.
    """
    place = dist.PrefixStore(f"unitrain/devices/{next(_starts)}", store)
    if place.add(f"id/{own}", 1) > 1:
        place.set("shared", "yes")
    if place.add("named", 1) == world_size:  # the last rank: all others have set theirs
        place.set("verdict", "shared" if place.check(["shared"]) else "own")
    return bool(place.get("verdict") == b"shared")
