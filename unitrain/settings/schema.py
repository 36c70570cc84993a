"""The settings of a configuration model: names, descriptions, allowed values and defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_origin

from pydantic import BaseModel

Path = tuple[str, ...]
"""Path of a setting: the names of its sections, then its own, as in ``("ddp", "bucket_cap_mb")``."""

_NOUNS = {"integer": "an integer", "number": "a number", "string": "a string", "null": "null"}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@dataclass(frozen=True)
class Setting:
    """One setting of a model, for help, documentation and error messages."""

    path: Path
    description: str
    choices: tuple[str, ...]
    """All allowed values, as written by the user; empty if they can't be listed."""
    allowed: str
    """The allowed values, as a phrase that follows "must be"."""
    default: str | None
    """The default, as written by the user; None if the setting is required."""

    @property
    def is_switch(self) -> bool:
        """Whether the setting is true or false."""
        return self.choices[:2] == ("true", "false")


@dataclass(frozen=True)
class Group:
    """A section of a model, with the settings directly in it."""

    path: Path
    description: str
    settings: tuple[Setting, ...]
    members: str
    """The names of the settings and sections directly in it, separated by commas."""


def dotted(path: Iterable[object]) -> str:
    """Return the name of a setting as a keyword and in YAML."""
    return ".".join(map(str, path))


def flag(path: Iterable[object]) -> str:
    """Return the name of a setting on the command line."""
    return "--" + dotted(path).replace("_", "-")


def variable(path: Iterable[object]) -> str:
    """Return the environment variable of a strategy setting."""
    return "UNITRAIN_" + "__".join(map(str, path)).upper()


def nested(values: Mapping[Path, str]) -> dict[str, Any]:
    """Return the values of settings as dicts in dicts, one for each section.

    Args:
        values: by path, as written in flags or environment variables.
    """
    root: dict[str, Any] = {}
    for path, value in values.items():
        section = root
        for part in path[:-1]:
            section = section.setdefault(part, {})
        section[path[-1]] = value
    return root


def is_section(annotation: object) -> bool:
    """Return whether a field of this type is a section, and not a setting."""
    # In Python 3.10 list[int] is an instance of type, but issubclass refuses it.
    return get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, BaseModel)


def groups_of(
    model: type[BaseModel], path: Path = (), description: str = "", set_by_default: BaseModel | None = None
) -> tuple[Group, ...]:
    """Return the sections of a model in the order of their definition, its own settings first.

    ``set_by_default`` is the default of a section, with fields that may have other values than the model's defaults.
    """
    properties = model.model_json_schema()["properties"]
    if set_by_default is not None:
        for name, value in set_by_default.model_dump(mode="json", exclude_unset=True).items():
            properties[name]["default"] = value
    settings: list[Setting] = []
    sections: list[Group] = []
    for name, field in model.model_fields.items():
        below = (*path, name)
        if is_section(field.annotation):
            section: Any = field.annotation
            default = field.default if set_by_default is None else getattr(set_by_default, name)
            sections += groups_of(section, below, field.description or section.__doc__ or "", default)
        else:
            settings.append(_setting(below, field.description or "", properties[name], field.is_required()))
    return (Group(path, description, tuple(settings), ", ".join(model.model_fields)), *sections)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence that suggests a known name for an unknown one, or an empty string.

    The unknown name is also compared with the last part of each known name, so that seed finds --strategy.seed.
    """
    known = [full for full in known if not name.startswith(f"{full}.")]
    if inside := [full for full in known if full.startswith((f"{name}.", f"{name}__"))]:
        return f" It is a section: give a setting in it, for example {inside[0]!r}."
    bare = {full.rsplit(".", 1)[-1].lstrip("-"): full for full in known} | {full.lstrip("-"): full for full in known}
    match = get_close_matches(name.lstrip("-"), bare, n=1)
    return f" Did you mean {bare[match[0]]!r}?" if match else ""


def _setting(path: Path, description: str, schema: Mapping[str, Any], required: bool) -> Setting:
    choices = _choices(schema)
    return Setting(
        path=path,
        description=" ".join(description.split()),
        choices=choices,
        allowed=_alternatives(choices) if choices else _phrase(schema),
        default=None if required else as_string(schema.get("default")),
    )


def as_string(value: object) -> str:
    """Return a plain value as written in a flag or an environment variable."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return ",".join(map(as_string, value)) if isinstance(value, (list, tuple)) else str(value)


def _choices(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the values that a JSON schema enumerates, or nothing if it also allows others."""
    if "anyOf" in schema:
        members = [_choices(member) for member in schema["anyOf"]]
        return tuple(value for choices in members for value in choices) if all(members) else ()
    if "const" in schema:
        return (as_string(schema["const"]),)
    closed = {"boolean": ("true", "false"), "null": ("null",)}
    return tuple(map(as_string, schema.get("enum", closed.get(schema.get("type", ""), ()))))


def _phrase(schema: Mapping[str, Any]) -> str:
    if "allowed" in schema:  # set by the model, in place of a pattern
        return str(schema["allowed"])
    if "anyOf" in schema:
        # null first: after "each an integer" it would seem to be one of the items.
        return _alternatives(sorted(map(_phrase, schema["anyOf"]), key=lambda phrase: phrase != "null"))
    kind = schema.get("type", "")
    if kind == "array":
        items = schema.get("items", {})
        if choices := _choices(items):
            return f"a list ({','.join(choices[:2])}), each {_alternatives(choices)}"
        return f"a list (0,1 or [0, 1]), each {_phrase(items)}"
    if kind == "string" and "path" in schema.get("format", ""):
        return "a path"
    noun = _NOUNS.get(kind, "a value")
    bounds = ", ".join(f"{sign} {schema[bound]:.15g}" for bound, sign in _BOUNDS.items() if bound in schema)
    return f"{noun} {bounds}".rstrip()


def _alternatives(phrases: Iterable[str]) -> str:
    *rest, last = phrases
    return f"{', '.join(rest)} or {last}" if rest else last
