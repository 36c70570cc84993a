"""Copies of a run's state in the memory of its hosts, from which a killed job resumes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from unitrain.config import Section

if TYPE_CHECKING:
    from unitrain.checkpoint import Checkpoint
    from unitrain.training.loop.sockets import Sockets


class MemoryCopiesSettings(Section):
    """Copies of the state in host memory, from which a killed job resumes."""

    every: Annotated[
        Literal["auto"] | Annotated[int, Field(ge=0, le=10**9)],
        Field(json_schema_extra={"allowed": "auto or an integer >= 0, <= 1000000000"}),
    ] = "auto"
    """Steps between two copies; auto: so many that copies take 1% of the time; 0: no copies."""
    folder: str | None = None
    """Folder of the copies, the same on each host; null: /dev/shm, or the one for temporary files without it."""


class Settings(Section):
    """The settings that this feature adds to a run."""

    memory_copies: MemoryCopiesSettings = MemoryCopiesSettings()


def attach(checkpoint: Checkpoint, sockets: Sockets) -> None:
    """Copy the states of a checkpoint from now on; without copies, an earlier start's must not come back."""
    from unitrain.features.memory_copies.copies import MemoryCopies
    from unitrain.job.job import current

    job = current()
    key = None if job is None or job.watch is None else job.watch.key
    copies = MemoryCopies(checkpoint, sockets, key)
    checkpoint.add_hook(copies)
    sockets.hooks.add_hook(copies)
    if copies.active:
        sockets.ways_back.append(copies)
