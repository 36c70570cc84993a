"""Checks through the store, before any process group exists, whether ranks share GPUs, which NCCL refuses."""

from __future__ import annotations

import itertools
import os
from typing import Any

import torch
import torch.distributed as dist

from unitrain.process import boot_id

# All ranks start their backends in the same order, so a count identifies a start. One store may serve several.
_starts = itertools.count()


def gpu_id(device: torch.device, rank: int) -> str:
    """Return an identifier of a rank's GPU, which two ranks have in common if NCCL would not take them both.

    NCCL tells GPUs by host and PCI address. MIG instances of one GPU share it, though their UUIDs differ. Other devices
    are told by their UUIDs, or by their indices, which processes that see one device each have in common.

    Args:
        device: the device of the rank.
        rank: its rank, which is part of the identifier if NCCL may be given one GPU twice.
    """
    module = torch.get_device_module(device)
    gpu: Any = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
    if hasattr(gpu, "pci_bus_id"):
        address = f"{boot_id()} {gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}"
    else:
        address = f"{boot_id()} {getattr(gpu, 'uuid', device)}"
    return f"{address} {rank}" if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else address


def any_shared(store: dist.Store, identifier: str, world_size: int) -> bool:
    """Return whether two ranks have the same identifier of their device. Collective; O(1) calls of the store.

    Args:
        store: a store that the ranks share.
        identifier: this rank's ``gpu_id``.
        world_size: the number of ranks. All must call this.
    """
    place = dist.PrefixStore(f"unitrain/devices/{next(_starts)}", store)
    if place.add(f"id/{identifier}", 1) > 1:
        place.set("shared", "yes")
    if place.add("named", 1) == world_size:  # the last rank: all others have set theirs
        place.set("verdict", "shared" if place.check(["shared"]) else "own")
    return bool(place.get("verdict") == b"shared")
