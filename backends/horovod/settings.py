"""Settings of the backend horovod."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from unitrain.config import Section


class HorovodSettings(Section):
    """Settings of the backend horovod."""

    controller: Literal["auto", "mpi", "gloo"] = "auto"
    """Controller that coordinates Horovod's processes; auto: chosen by the launcher."""
    fusion_threshold_mb: Annotated[float, Field(ge=0, le=2**20)] | None = None
    """Size of Horovod's fusion buffer in MiB; null: HOROVOD_FUSION_THRESHOLD, else Horovod's default of 128."""
    cycle_time_ms: Annotated[float, Field(gt=0, le=60_000)] | None = None
    """Milliseconds between Horovod's cycles; null: HOROVOD_CYCLE_TIME, else Horovod's default of 1."""
