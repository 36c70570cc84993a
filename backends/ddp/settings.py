"""Settings of the backend ddp."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..process_group.settings import ProcessGroupSettings


class DDPSettings(ProcessGroupSettings):
    """Settings of the backend ddp (torch's DistributedDataParallel)."""

    find_unused_parameters: bool = False
    """Allow steps that don't use all parameters, on some ranks or on all; slower."""
    bucket_cap_mb: Annotated[float, Field(gt=0, le=2**20)] = 25.0
    """Size of a gradient bucket in MiB; smaller: more overlap with backward, larger: less latency."""
    powersgd_rank: Annotated[int, Field(ge=1, le=1024)] = 2
    """With compression powersgd: rank of the matrices that are sent; higher is more exact, and larger."""
    powersgd_start_step: Annotated[int, Field(ge=2, le=1_000_000_000)] = 1000
    """With compression powersgd: number of exact steps first; try a tenth of all steps."""
