"""The settings that all backends share, and the base class of all sections: frozen pydantic models.

A field's docstring is its ``--help`` message. A backend defines its own settings as ``Backend.Settings``;
``unitrain.settings.strategy_config`` adds them to ``StrategyConfig``, one section for each installed backend. The
result is ``unitrain.StrategyConfig``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

Precision = Literal["fp32", "fp64", "bf16", "fp16"]
CompileMode = Literal["reduce-overhead", "max-autotune"]
SectionType = TypeVar("SectionType", bound="Section")


class Section(BaseModel):
    """Base class of every part of a configuration, including a recipe's: a frozen model without unknown keys.

    Fields hold plain values (ints, floats, strings, paths, choices, lists of them) or further sections, so that each
    can be set by a flag, an environment variable or YAML.
    """

    # A misspelt setting would have no effect without "forbid", and an infinity would pass every lower bound.
    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
    fixed_in_run: ClassVar[tuple[str, ...]] = ()
    """Names of settings that must not change when a run is resumed."""

    def names_fixed(self) -> list[str]:
        """Return the names of the settings that must not change when a run is resumed, those of sections with dots."""
        names = [name for kind in type(self).__mro__ for name in vars(kind).get("fixed_in_run", ())]
        sections = [(name, value) for name, value in self if isinstance(value, Section)]
        return [*names, *(f"{name}.{inner}" for name, section in sections for inner in section.names_fixed())]

    @classmethod
    def of(cls, config: Section) -> Self:
        """Return the part of a configuration that this class declares; the defaults if the configuration lacks it."""
        return config if isinstance(config, cls) else cls()

    @field_validator("*", mode="before")
    @classmethod
    def _read_plain(cls, value: Any, info: ValidationInfo) -> Any:
        """Parse values that flags and environment variables write as strings, and refuse a boolean for a number."""
        members = _union_members(cls.model_fields[str(info.field_name)].annotation)
        choices = [choice for member in members if get_origin(member) is Literal for choice in get_args(member)]
        if value == "null" and type(None) in members:
            return None
        if (
            isinstance(value, str)
            and str not in members
            and value not in choices
            and not (bool in members and value.lower() in ("true", "false"))
            and any(get_origin(member) in (list, tuple) for member in members)
        ):
            # A list in a flag or variable: "1,2", or with the brackets of YAML.
            items = value.removeprefix("[").removesuffix("]")
            return [item.strip() for item in items.split(",")] if value != "[]" else []
        if isinstance(value, bool) and bool not in members and {int, float} & set(members):
            # YAML reads yes and on as true, which pydantic would take for 1.
            raise PydanticCustomError("bool_for_number", "Input should be a number, not a boolean")
        return value


def _union_members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union without their ``Annotated``, or the type itself if it is not a union."""
    alternatives = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return tuple(get_args(member)[0] if get_origin(member) is Annotated else member for member in alternatives)


class StrategyConfig(Section):
    """Settings of a training run: backend, device, precision, gradient handling.

    Scripts use ``unitrain.StrategyConfig``, which also has a section for each installed backend.
    """

    # Launcher, backend, world size and timeouts may change.
    fixed_in_run: ClassVar[tuple[str, ...]] = ("seed", "precision", "clip_norm", "compression")

    backend: Annotated[str, Field(min_length=1, json_schema_extra={"allowed": "auto or a backend's name"})] = "auto"
    """Backend: single, data_parallel, ddp, fsdp, horovod or a plug-in; auto chooses by launcher and GPUs."""
    device: Annotated[
        str,
        Field(
            pattern="^[a-z][a-z0-9_]*(:[0-9]+)?$",
            json_schema_extra={"allowed": "auto, cpu, cuda, cuda:N or another of torch's types"},
        ),
    ] = "auto"
    """Device to compute on; auto: the accelerator of this local rank, or else the CPU."""
    precision: Precision = "fp32"
    """fp32; bf16 or fp16 (autocast with float32 weights); fp64 (casts model and inputs; to verify results)."""
    compile: bool | CompileMode = False
    """Compile prepared models with torch.compile: true, or a mode. The first steps take longer."""
    broadcast_buffers: bool = True
    """Broadcast rank 0's values of buffers that a forward changes (not BatchNorm's) after each step, as DDP does."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of python's, numpy's and torch's generators on every rank, and of the order of the data."""
    deterministic: bool = False
    """Use deterministic algorithms only; slower, and an error where torch has none."""
    accumulate: Annotated[int, Field(ge=1)] = 1
    """Micro-batches per optimizer step (gradient accumulation); global_batch_size is the sum over them."""
    shares: Annotated[
        tuple[Annotated[int, Field(ge=1, le=1000)], ...] | None,
        Field(json_schema_extra={"allowed": "null or a list (2,1,1), each an integer >= 1, <= 1000"}),
    ] = None
    """Each rank's share of the samples, on unequal devices; null: equal shares."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Clip gradients to this total 2-norm; null: no clipping."""
    on_nonfinite: Literal["stop", "skip", "raise"] = "stop"
    """What all ranks do when a loss or gradient is NaN or infinite: stop the run, skip the step, or raise."""
    compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Compress gradients: half the bytes (fp16, bf16) or far fewer (powersgd, ddp only); lossy."""
    debug: bool = False
    """Compare the ranks' calls before each collective, and keep local gradients to find which rank's is not finite."""
    timeout_s: Annotated[float, Field(gt=0, le=1_000_000)] = 600.0
    """Timeout of a collective in seconds; after it the job ends with an error."""
    heartbeat_timeout_s: Annotated[float, Field(gt=0, le=1_000_000)] = 30.0
    """Seconds without a heartbeat after which a rank counts as stalled and the job ends; at most timeout_s."""
    pin_memory: bool | None = None
    """Load batches into pinned memory, for faster copies to a GPU; null: on a GPU, for what workers read."""

    def section(self, backend: str, kind: type[SectionType]) -> SectionType:
        """Return the settings of a backend, of class ``kind``, or the defaults if there is no section for it."""
        section = getattr(self, backend, None)
        return section if isinstance(section, kind) else kind()

    def sections_of_others(self, backend: str) -> dict[str, Section]:
        """Return the sections of other backends than this one, by name, whether or not they differ from the defaults.

        Args:
            backend: name of the backend that the run uses.
        """
        # unitrain.StrategyConfig inherits what the core and features declare, and adds the sections of backends.
        inherited = {name for base in type(self).__bases__ if issubclass(base, Section) for name in base.model_fields}
        names = type(self).model_fields.keys() - inherited - {backend}
        return {name: getattr(self, name) for name in type(self).model_fields if name in names}  # in declared order

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> StrategyConfig:
        """Refuse settings that are mutually exclusive."""
        if self.precision == "fp64" and self.compression != "none":
            raise conflict("precision", "compression", "fp64 is for exact comparisons, and compression is lossy")
        # powersgd adds what it has not sent to the gradients of the next step: one bad gradient would never leave them.
        if self.compression == "powersgd":
            if self.deterministic:
                raise conflict("deterministic", "compression", "powersgd needs DDP's buckets, whose order may vary")
            if self.precision == "fp16":
                raise conflict("precision", "compression", "powersgd carries an overflow into all later steps")
            if self.on_nonfinite == "skip":
                raise conflict("on_nonfinite", "compression", "powersgd carries a skipped gradient into later steps")
        return self


def flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings in one dict, by their names with dots."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat.update(flattened(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value})
    return flat


def conflict(setting: str, excluded: str, reason: str) -> PydanticCustomError:
    """Return the error that a section's validator raises if two of its settings are mutually exclusive.

    The error message names both as they were written (flag, variable, line of a file), with their values.

    Args:
        setting: name of a setting within the section.
        excluded: name of the setting that it excludes.
        reason: why, as a clause without a full stop.
    """
    # settings/ reads the two names from this context, and replaces them by what the user wrote.
    return PydanticCustomError(
        "conflict",
        "{one} and {other} are mutually exclusive: {reason}",
        {"one": setting, "other": excluded, "reason": reason},
    )
