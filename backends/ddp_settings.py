"""The settings of the backend ddp."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from unitrain.config import Section, conflict


class DDPSettings(Section):
    """Settings of the backend ddp (torch's DistributedDataParallel)."""

    communication: Literal["auto", "nccl", "gloo"] = "auto"
    """Communication library: auto takes nccl where every process has a GPU of its own, else gloo."""
    find_unused_parameters: bool = False
    """Search each backward for parameters that took no part; needed when some don't, and slower."""
    static_graph: bool = False
    """Promise that the same parameters take part in every step, which lets DDP skip work."""
    gradient_as_bucket_view: bool = True
    """Let gradients be views of the communication buckets: one copy less for each step."""
    bucket_cap_mb: Annotated[float, Field(gt=0, le=2**20)] = 25.0
    """Size of a gradient bucket in MiB: smaller overlaps more, larger has less latency."""
    broadcast_buffers: bool = False
    """Copy rank 0's buffers to all ranks before each forward."""
    powersgd_rank: Annotated[int, Field(ge=1, le=1024)] = 2
    """With compression powersgd: the rank of the matrices that travel; more is nearer to the gradient, and larger."""
    powersgd_start_step: Annotated[int, Field(ge=2, le=1_000_000_000)] = 1000
    """With compression powersgd: how many steps are exact first; a tenth of all is a good start."""

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> DDPSettings:
        if self.static_graph and self.find_unused_parameters:
            raise conflict("static_graph", "find_unused_parameters", "a static graph has none that vary")
        return self
