"""What ``unitrain.init`` takes by keyword, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from typing_extensions import TypedDict

from unitrain.config import Precision, Section


class StrategySettings(TypedDict, total=False):
    """The fields of ``StrategyConfig``, all optional; what each means is said there."""

    backend: str
    device: str
    precision: Precision
    sync_batchnorm: bool
    seed: int
    deterministic: bool
    accumulate: int
    clip_norm: float | None
    clip_value: float | None
    grad_norm: bool
    on_nonfinite: Literal["stop", "skip", "raise"]
    compression: Literal["none", "fp16", "bf16", "powersgd"]
    check_in_sync_every: int
    debug: bool
    timeout_s: float
    heartbeat_timeout_s: float
    threads_per_process: int | None
    cudnn_benchmark: bool | None
    tf32: bool | None
    pin_memory: bool | None
    # The one place of the core that names backends, and only for type checkers. "Any further keyword is a section"
    # can be said with PEP 728's extra_items, which mypy does not know yet. Settings of a plug-in type-check in a
    # ``dict[str, Any]``, as in ``init(**{...})``, or in a StrategyConfig.
    data_parallel: Section | Mapping[str, Any]
    ddp: Section | Mapping[str, Any]
    horovod: Section | Mapping[str, Any]
