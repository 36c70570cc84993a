"""Reads settings from YAML files strictly."""

from __future__ import annotations

import reprlib
from typing import Any

import yaml

from unitrain.errors import ConfigError


def read(name: str) -> dict[str, Any]:
    """Return the settings of a YAML file; ``name`` is its path, as the user wrote it."""
    try:
        with open(name, encoding="utf-8-sig") as file:
            values = yaml.load(file, _StrictLoader)
    except OSError as error:
        raise ConfigError(f"--config {name} can't be read: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not in UTF-8, or a date in month 99
        raise ConfigError(f"--config {name} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--config {name} must hold 'name: value' settings, but is {reprlib.repr(values)}.")
    return values


class _StrictLoader(yaml.SafeLoader):
    """Refuses duplicate keys, where yaml.SafeLoader silently takes the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value!r}", problem_mark=key.start_mark)
            seen.add(key.value)
        return node
