"""The configuration of a strategy: frozen pydantic models, one section for each backend.

Every field's description is its ``--help`` text. Where values come from (defaults, a YAML file, the environment,
keyword arguments, the command line) is ``settings.py``'s business.
"""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

Precision = Literal["fp32", "fp64", "bf16", "fp16"]


class Section(BaseModel):
    """A frozen model that refuses unknown keys; base of every part of a configuration, a recipe's own included.

    Fields hold plain values (numbers, texts, paths, choices, lists of them) or further sections, so that each can be
    written as a flag, as a variable and in YAML.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _read_plain(cls, value: Any, info: ValidationInfo) -> Any:
        """Read what a flag or a variable can only write as text, and refuse a truth value where a number belongs."""
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
            raise PydanticCustomError("bool_for_number", "Input should be a number, not a truth value")
        return value


def _union_members(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type without their ``Annotated``: itself where it is no union."""
    alternatives = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return tuple(get_args(member)[0] if get_origin(member) is Annotated else member for member in alternatives)


class DataParallelConfig(Section):
    """Settings of the backend data_parallel (torch's DataParallel)."""

    device_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None = None
    """GPUs that hold a replica, each once; null takes every visible one."""
    output_device: Annotated[int, Field(ge=0)] | None = None
    """GPU that gathers the outputs; null takes the first of device_ids."""

    @field_validator("device_ids")
    @classmethod
    def _each_device_once(cls, device_ids: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if device_ids and len(set(device_ids)) < len(device_ids):
            raise ValueError("names a GPU twice; each holds one replica")
        return device_ids


class DDPConfig(Section):
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


class HorovodConfig(Section):
    """Settings of the backend horovod."""

    controller: Literal["auto", "mpi", "gloo"] = "auto"
    """What coordinates Horovod's processes: auto follows the launcher."""
    fusion_threshold_mb: Annotated[float, Field(ge=0, le=2**20)] | None = None
    """Size of Horovod's fusion buffer in MiB; null leaves HOROVOD_FUSION_THRESHOLD or Horovod's own, 128."""
    cycle_time_ms: Annotated[float, Field(gt=0, le=60_000)] | None = None
    """Milliseconds between Horovod's negotiations; null leaves HOROVOD_CYCLE_TIME or Horovod's own, 1."""


class StrategyConfig(Section):
    """How a training script runs: backend, device, precision, gradient handling, and one section per backend."""

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
    cudnn_benchmark: bool = True
    """Let cuDNN time its algorithms and keep the fastest (best for inputs of one size)."""
    tf32: bool = True
    """Let CUDA compute float32 matrix products and convolutions in TF32."""
    pin_memory: bool | None = None
    """Load batches into page-locked memory, for faster copies to a GPU; null does when training on a GPU."""
    data_parallel: DataParallelConfig = DataParallelConfig()
    """Settings of the backend data_parallel (torch's DataParallel)."""
    ddp: DDPConfig = DDPConfig()
    """Settings of the backend ddp (torch's DistributedDataParallel)."""
    horovod: HorovodConfig = HorovodConfig()
    """Settings of the backend horovod."""

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> StrategyConfig:
        """Refuse pairs of settings that exclude each other in every run."""
        if self.ddp.static_graph and self.accumulate > 1:
            raise _conflict("ddp.static_graph", "accumulate", "DDP aborts when a static graph skips a reduction")
        if self.ddp.static_graph and self.ddp.find_unused_parameters:
            raise _conflict("ddp.static_graph", "ddp.find_unused_parameters", "a static graph has none that vary")
        if self.precision == "fp64" and self.compression != "none":
            raise _conflict("precision", "compression", "fp64 proves parity, which rounded gradients break")
        if self.compression == "powersgd":
            if self.deterministic:
                raise _conflict(
                    "deterministic", "compression", "powersgd works on DDP's own buckets, whose order varies"
                )
            if self.precision == "fp16":
                raise _conflict("precision", "compression", "powersgd would carry an overflow into all later steps")
            if self.on_nonfinite == "skip":
                raise _conflict("on_nonfinite", "compression", "powersgd would carry what is skipped into later steps")
        return self


def _conflict(one: str, other: str, reason: str) -> PydanticCustomError:
    """Return the error of two settings (by dotted name) that exclude each other; settings.py words it for a user."""
    return PydanticCustomError(
        "conflict", "{one} and {other} exclude each other: {reason}", {"one": one, "other": other, "reason": reason}
    )
