"""Merges sources of settings into a valid model, or reports every wrong setting by name and source."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from unitrain.errors import ConfigError
from unitrain.settings.schema import as_string, did_you_mean, dotted, flag, groups_of
from unitrain.settings.strategy_config import why_unknown

Model = TypeVar("Model", bound=BaseModel)

_NOTHING = object()


@dataclass(frozen=True)
class Source:
    """The values of one source, and the names of settings in it."""

    values: dict[str, Any]
    name_of: Callable[[Iterable[object]], str]

    def get(self, path: Iterable[object]) -> object:
        """Return the value at a path, or ``_NOTHING``."""
        here: object = self.values
        for part in path:
            here = here.get(part, _NOTHING) if isinstance(here, dict) else _NOTHING
        return here


def validate(model: type[Model], sources: Sequence[Source]) -> Model:
    """Return the model that results from merging the sources, in order of increasing precedence."""
    values: dict[str, Any] = {}
    for source in sources:
        values = _merge(values, source.values)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        messages = _Messages(model, sources)
        # Every member of a union reports an error, with the same line.
        lines = dict.fromkeys(messages.describe(details) for details in error.errors(include_url=False))
        raise ConfigError("\n".join(lines)) from None


def _merge(weak: Mapping[str, Any], strong: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(weak)
    for name, value in strong.items():
        below = merged.get(name)
        merged[name] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


class _Messages:
    """Formats the errors of pydantic."""

    def __init__(self, model: type[BaseModel], sources: Sequence[Source]) -> None:
        self._groups = {group.path: group for group in groups_of(model)}
        self._settings = {setting.path: setting for group in self._groups.values() for setting in group.settings}
        self._strongest_first = sources[::-1]

    def describe(self, details: ErrorDetails) -> str:
        kind, path = details["type"], details["loc"]
        if kind == "conflict":
            first, second = (self._assignment((*path, *details["ctx"][key].split("."))) for key in ("one", "other"))
            return f"{first}, and {second}; they are mutually exclusive: {details['ctx']['reason']}."
        if kind == "extra_forbidden":
            return self._unknown(path)
        if kind == "invalid_key":
            return (
                f"the key {_shown(details['input'])} is not a string, as the name of a setting is (in YAML, quote it)."
            )
        # The path may continue into an item of a list, or a member of a union.
        while path not in self._settings and path not in self._groups:
            path = path[:-1]
        if kind == "missing":
            return f"{flag(path)} is required: {self._allowed(path)}."
        if kind in ("value_error", "assertion_error"):  # the validator's message follows pydantic's prefix
            reason = details["msg"].partition(", ")[2]
            return f"{self._assignment(path)}: {reason}." if path in self._settings else f"{reason}."
        return f"{self._assignment(path)}, but must be {self._allowed(path)}."

    def _unknown(self, path: tuple[int | str, ...]) -> str:
        wrong = dotted(path)
        suggestion = why_unknown(wrong) or did_you_mean(wrong, map(dotted, [*self._settings, *self._groups]))
        section = self._groups[tuple(map(str, path[:-1]))]
        name = self._source_of(path).name_of(path)
        return f"{name} is not a setting.{suggestion or f' Available settings: {section.members}.'}"

    def _assignment(self, path: tuple[int | str, ...]) -> str:
        """Return ``name is value``, with the name as the user wrote it."""
        if all(source.get(path) is _NOTHING for source in self._strongest_first):  # one of two that exclude each other
            return f"{dotted(path)} is {self._settings[tuple(map(str, path))].default} (the default)"
        source = self._source_of(path)
        return f"{source.name_of(path)} is {_shown(source.get(path))}"

    def _source_of(self, path: tuple[int | str, ...]) -> Source:
        return next(source for source in self._strongest_first if source.get(path) is not _NOTHING)

    def _allowed(self, path: tuple[int | str, ...]) -> str:
        key = tuple(map(str, path))
        return self._settings[key].allowed if key in self._settings else f"a section with {self._groups[key].members}"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


def _shown(value: object) -> str:
    return as_string(value) if value is None or isinstance(value, bool) else _SHORT.repr(value)
