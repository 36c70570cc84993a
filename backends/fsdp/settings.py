"""Settings of the backend fsdp."""

from __future__ import annotations

from typing import Literal

from ..process_group.settings import ProcessGroupSettings

LARGE = 2**20
"""Bytes of blocks that glibc returns to the system when they are freed, and of units that take several messages."""


class FSDPSettings(ProcessGroupSettings):
    """Settings of the backend fsdp (torch's fully_shard)."""

    wrap: tuple[str, ...] | None = None
    """Classes of the modules to gather one at a time; null: the children of lists of modules; []: none."""
    reshard_after_forward: bool = True
    """Free what was gathered after the forward and gather it again in the backward: less memory, slower."""
    reshard_after_backward: bool = True
    """Free what was gathered after each backward; false: at the step, as a loss with a gradient in it needs."""
    find_unused_parameters: bool = False
    """Allow steps that don't use all parameters; the whole model is gathered at once then, which takes more memory."""
    shards: Literal["all", "host"] = "all"
    """Shard parameters among all ranks, or among the ranks of each host; hosts then have replicas."""
