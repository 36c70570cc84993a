"""Settings of the backend horovod."""

from __future__ import annotations

from typing import Literal

from unitrain.config import Section


class HorovodSettings(Section):
    """Settings of the backend horovod."""

    controller: Literal["auto", "mpi", "gloo"] = "auto"
    """Controller that coordinates Horovod's processes; auto: chosen by the launcher."""
