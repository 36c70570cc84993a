"""The keyword arguments of ``unitrain.init``, for editors and type checkers.

At run time, the installed backends and features declare them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from typing_extensions import TypedDict

from unitrain.config import CompileMode, Precision, Section


class StrategySettings(TypedDict, total=False):
    """The fields of ``StrategyConfig``, all optional; see there for their meaning."""

    backend: str
    device: str
    precision: Precision
    sync_batchnorm: bool
    activation_checkpointing: bool | tuple[str, ...]
    compile: bool | CompileMode
    broadcast_buffers: bool
    seed: int
    exact_randomness: bool
    deterministic: bool
    accumulate: int
    ranks_per_batch: int
    shares: tuple[int, ...] | None
    clip_norm: float | None
    on_nonfinite: Literal["stop", "skip", "raise"]
    on_spike: Literal["ignore", "warn", "skip", "rewind", "stop"]
    compression: Literal["none", "fp16", "bf16", "powersgd"]
    shard_optimizer: bool
    local_sgd: Section | Mapping[str, Any]
    debug: bool
    timeout_s: float
    heartbeat_timeout_s: float
    metrics: Section | Mapping[str, Any]
    pin_memory: bool | None
    memory_copies: Section | Mapping[str, Any]
    # The only place in the core that names backends, and only for type checkers. PEP 728's extra_items could declare
    # any other keyword to be a section, but mypy does not support it yet. Settings of a plug-in type-check in a
    # ``dict[str, Any]``, as in ``init(**{...})``, or in a StrategyConfig.
    ddp: Section | Mapping[str, Any]
    fsdp: Section | Mapping[str, Any]
    horovod: Section | Mapping[str, Any]
