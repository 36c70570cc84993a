"""Whether the ranks share GPUs, which NCCL refuses: found out through the store, before any group exists."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

# Ranks start their backends in the same order, so a number names the same start on all; a store may serve several.
_starts = itertools.count()


def gpu_id(device: torch.device) -> str:
    """Return what identifies a GPU among all hosts."""
    return str(torch.cuda.get_device_properties(device).uuid)


def any_shared(store: dist.Store, own: str, world_size: int) -> bool:
    """Return whether two ranks named the same device; the same on all ranks. Collective; O(1) calls on each rank.

    Args:
        store: all ranks'.
        own: what identifies this rank's device.
        world_size: number of ranks.
    """
    place = dist.PrefixStore(f"unitrain/devices/{next(_starts)}", store)
    if place.add(f"id/{own}", 1) > 1:
        place.set("shared", "yes")
    if place.add("named", 1) == world_size:  # the last to come knows of all
        place.set("verdict", "shared" if place.check(["shared"]) else "own")
    return bool(place.get("verdict") == b"shared")
