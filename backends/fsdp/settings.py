"""Settings of the backend fsdp."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from ..process_group.settings import ProcessGroupSettings

LARGE = 2**20
"""Bytes of blocks that glibc returns to the system when they are freed, and of units that take several messages."""


class FSDPSettings(ProcessGroupSettings):
    """Settings of the backend fsdp (torch's fully_shard)."""

    wrap: Annotated[
        tuple[str, ...] | Annotated[int, Field(ge=1)] | None,
        Field(json_schema_extra={"allowed": "names of classes, a number of parameters or null"}),
    ] = None
    """Modules to gather one at a time: of these classes, or of this size; null: the children of lists of modules."""
    reshard_after_forward: bool = True
    """Free what was gathered after the forward and gather it again in the backward: less memory, slower."""
    reshard_after_backward: bool = True
    """Free what was gathered after each backward; false: at the step, as a loss with a gradient in it needs."""
    find_unused_parameters: bool = False
    """Allow steps that don't use all parameters; the whole model is gathered at once then, which takes more memory."""
    cpu_offload: bool = False
    """Keep shards of weights, gradients and optimizer state in host memory, where the optimizer steps; slower."""
    shards: Literal["all", "host"] = "all"
    """Shard parameters among all ranks, or among the ranks of each host; hosts then have replicas."""

    @field_validator("wrap", mode="before")
    @classmethod
    def _read_size(cls, value: Any) -> Any:
        """Read a number, which flags and environment variables write as text, before it is taken for a list."""
        return int(value) if isinstance(value, str) and value.isdecimal() else value
