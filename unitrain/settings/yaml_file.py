"""Reads settings from YAML files strictly, and writes them."""

from __future__ import annotations

import re
import reprlib
from typing import Any

import yaml

from unitrain.errors import ConfigError


def read(name: str) -> dict[str, Any]:
    """Return the settings of a YAML file; ``name`` is its path, as the user wrote it."""
    try:
        with open(name, encoding="utf-8-sig") as file:
            content = file.read()
    except OSError as error:
        raise ConfigError(f"--config {name} can't be read: {error.strerror}.") from None
    except ValueError:
        raise ConfigError(f"--config {name} is not a YAML file: it is not encoded in UTF-8.") from None
    try:
        values = yaml.load(content, _StrictLoader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        reason = ": ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(f"--config {name}{line}: invalid YAML: {reason}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config {name}: invalid YAML: {reason}.") from None
    if not isinstance(values, dict):
        content = "empty" if values is None else reprlib.repr(values)
        raise ConfigError(f"--config {name} must hold 'name: value' settings, but is {content}.")
    return values


class _StrictLoader(yaml.SafeLoader):
    """Refuses keys that are not strings, and duplicate keys, where yaml.SafeLoader silently takes the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # refused when it is constructed: lists and mappings are unhashable
            if key.tag not in (self.DEFAULT_SCALAR_TAG, "tag:yaml.org,2002:merge"):
                problem = f"the key {key.value!r} is not a string (quote it if it is meant to be one)"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            if key.value in first:
                problem = f"duplicate key {key.value!r}, first in line {first[key.value]}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            first[key.value] = key.start_mark.line + 1
        return node


def dump(values: dict[str, Any]) -> str:
    """Return plain values as YAML that ``read`` takes."""
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    # Unicode's line breaks are also YAML's, but PyYAML does not escape them in Unicode.
    has_breaks = re.search("[\x85\u2028\u2029]", text) is not None
    return yaml.safe_dump(values, sort_keys=False) if has_breaks else text
