"""The settings that every backend shares, and the base of all sections: frozen pydantic models.

Every field's docstring is its ``--help`` text. A backend's own settings stand beside the backend (``Settings``);
``unitrain.settings.strategy_config`` adds them to ``StrategyConfig`` as one section for each installed backend, and
``unitrain.StrategyConfig`` is the result.
"""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

Precision = Literal["fp32", "fp64", "bf16", "fp16"]
SectionType = TypeVar("SectionType", bound="Section")


class Section(BaseModel):
    """A frozen model that refuses unknown keys; base of every part of a configuration, a recipe's own included.

    Fields hold plain values (ints, floats, strings, paths, choices, lists of them) or further sections, so that each
    can be written as a flag, as a variable and in YAML.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _read_plain(cls, value: Any, info: ValidationInfo) -> Any:
        """Parse what a flag or a variable can only write as a string, and refuse a boolean where a number belongs."""
        members = _union_members(cls.model_fields[str(info.field_name)].annotation)
        if value == "null" and type(None) in members:
            return None
        if (
            isinstance(value, str)
            and str not in members
            and any(get_origin(member) in (list, tuple) for member in members)
        ):
            return [item.strip() for item in value.split(",")]
        if isinstance(value, bool) and bool not in members and {int, float} & set(members):
            # YAML reads yes and on as true, which pydantic would take for 1.
            raise PydanticCustomError("bool_for_number", "Input should be a number, not a boolean")
        return value


def _union_members(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type without their ``Annotated``: itself where it is no union."""
    alternatives = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return tuple(get_args(member)[0] if get_origin(member) is Annotated else member for member in alternatives)


class StrategyConfig(Section):
    """How a training script runs: backend, device, precision, gradient handling.

    Scripts use ``unitrain.StrategyConfig``, which also has a section for each installed backend.
    """

    backend: Annotated[str, Field(min_length=1, json_schema_extra={"allowed": "auto or a backend's name"})] = "auto"
    """Who communicates: single, data_parallel, ddp, horovod or a plugin's; auto follows launcher and GPUs."""
    device: Annotated[
        str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$", json_schema_extra={"allowed": "auto, cpu, cuda or cuda:N"})
    ] = "auto"
    """Where to compute; auto takes the GPU of this local rank, or the CPU where there is none."""
    precision: Precision = "fp32"
    """fp32; bf16 or fp16 (autocast over float32 weights); fp64 (casts model and inputs; exists to prove parity)."""
    sync_batchnorm: bool = False
    """Compute BatchNorm's statistics over the global batch instead of each process's share."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seeds python, numpy and torch on every rank, and the order of the data."""
    deterministic: bool = False
    """Ask torch for deterministic algorithms; slower, and an error where there is none."""
    accumulate: Annotated[int, Field(ge=1)] = 1
    """Micro-batches in one optimizer step; global_batch_size covers them all."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Scale the gradients so that their total 2-norm is at most this; null doesn't."""
    clip_value: Annotated[float, Field(gt=0)] | None = None
    """Clamp every element of the gradients to plus or minus this; null doesn't."""
    grad_norm: bool = False
    """Return the gradients' 2-norm in every StepResult, though nothing is clipped."""
    on_nonfinite: Literal["stop", "skip", "raise"] = "stop"
    """What all ranks do when a loss or gradient is NaN or infinite: stop the run, skip the step, or raise."""
    compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Send gradients in half the bytes (fp16, bf16) or far fewer (powersgd, under ddp); no longer exactly the same."""
    check_in_sync_every: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Optimizer steps between checks that all ranks hold the same weights, for debugging; 0: never."""
    debug: bool = False
    """Compare every collective call before it is made, and keep each rank's own gradients to tell whose is bad."""
    timeout_s: Annotated[float, Field(gt=0, le=1_000_000)] = 600.0
    """Seconds that a collective may wait for the other ranks before the job ends with an error."""
    heartbeat_timeout_s: Annotated[float, Field(gt=0, le=1_000_000)] = 30.0
    """Seconds that a process may give no sign of life before the job ends; at most timeout_s is taken."""
    threads_per_process: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Compute threads of each process; null leaves OMP_NUM_THREADS or takes cores // processes on this host."""
    cudnn_benchmark: bool | None = None
    """Let cuDNN time its algorithms and keep the fastest (best for inputs of one size); null leaves torch's setting."""
    tf32: bool | None = None
    """Let CUDA compute float32 matrix products and convolutions in TF32; null leaves torch's: convolutions only."""
    pin_memory: bool | None = None
    """Load batches into page-locked memory, for faster copies to a GPU; null does on a GPU, for what workers read."""

    def section(self, backend: str, kind: type[SectionType]) -> SectionType:
        """Return the settings of one backend: the defaults where this configuration has no section for it.

        Args:
            backend: the backend's name.
            kind: its class of settings.
        """
        found = getattr(self, backend, None)
        return found if isinstance(found, kind) else kind()

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> StrategyConfig:
        """Refuse pairs of settings that exclude each other in every run."""
        if self.precision == "fp64" and self.compression != "none":
            raise conflict("precision", "compression", "fp64 proves parity, which rounded gradients break")
        if self.compression == "powersgd":
            if self.deterministic:
                raise conflict(
                    "deterministic", "compression", "powersgd works on DDP's own buckets, whose order varies"
                )
            if self.precision == "fp16":
                raise conflict("precision", "compression", "powersgd would carry an overflow into all later steps")
            if self.on_nonfinite == "skip":
                raise conflict("on_nonfinite", "compression", "powersgd would carry what is skipped into later steps")
        return self


def conflict(one: str, other: str, reason: str) -> PydanticCustomError:
    """Return the error that a section's validator raises where two of its settings exclude each other.

    The message that the user reads names both as they were written (flag, variable, line of a file), with their values.

    Args:
        one: name of a setting, from the section on.
        other: name of the setting that it excludes.
        reason: why, as a clause without a full stop.
    """
    return PydanticCustomError(
        "conflict", "{one} and {other} exclude each other: {reason}", {"one": one, "other": other, "reason": reason}
    )
