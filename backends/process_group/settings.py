"""Settings that the backends on torch.distributed share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from unitrain.config import Section


class ProcessGroupSettings(Section):
    """The base of the settings of a backend on torch.distributed."""

    communication: Annotated[
        str, Field(pattern="^[a-z][a-z0-9_]*$", json_schema_extra={"allowed": "auto, nccl, gloo or another of torch's"})
    ] = "auto"
    """Communication library; auto: the device's (nccl on GPUs), gloo on CPUs and shared GPUs."""
