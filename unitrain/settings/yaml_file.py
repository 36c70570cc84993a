"""Reads settings from YAML files strictly, with the line of each key, and writes them."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable
from typing import Any

import yaml

from unitrain.errors import ConfigError
from unitrain.settings.schema import dotted


class YamlFile:
    """The settings of one YAML file.

    Args:
        name: path of the file, as the user wrote it.

    Raises:
        ConfigError: the file can't be read, is not UTF-8, not YAML or not a mapping, or has a duplicate key or a tag
            of a Python object.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.values: dict[str, Any]
        self.values, self._root = self._load(self._read())

    def name_of(self, path: Iterable[object]) -> str:
        """Return the name of a setting with the file and, if the setting or its section is in it, the line."""
        path = tuple(path)
        node, line = self._root, None
        for part in path:
            # The last one counts: keys merged from an anchor come before the section's own.
            found = [
                pair for pair in getattr(node, "value", ()) if isinstance(pair, tuple) and pair[0].value == str(part)
            ]
            if not found:
                break
            key, node = found[-1]
            line = key.start_mark.line + 1
        return f"{dotted(path)} ({self._name}{'' if line is None else f', line {line}'})"

    def _read(self) -> str:
        try:
            with open(self._name, encoding="utf-8-sig") as file:
                return file.read()
        except OSError as error:
            raise ConfigError(f"--config {self._name} can't be read: {error.strerror}.") from None
        except ValueError:
            raise ConfigError(f"--config {self._name} is not a YAML file: it is not encoded in UTF-8.") from None

    def _load(self, content: str) -> tuple[dict[str, Any], yaml.Node]:
        loader = None
        try:
            loader = _StrictLoader(content)
            root = loader.get_single_node()
            values = None if root is None else loader.construct_document(root)
        except yaml.MarkedYAMLError as error:
            line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
            reason = ": ".join(filter(None, (error.context, error.problem)))
            raise ConfigError(f"--config {self._name}{line}: invalid YAML: {reason}.") from None
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"--config {self._name}: invalid YAML: {reason}.") from None
        finally:
            if loader is not None:
                loader.dispose()
        if root is None or not isinstance(values, dict):
            found = "empty" if root is None else reprlib.repr(values)
            raise ConfigError(f"--config {self._name} must hold 'name: value' settings, but is {found}.")
        return values, root


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
    """Return plain values as YAML that ``YamlFile`` can read."""
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    # Unicode's line breaks are also YAML's, but PyYAML does not escape them in Unicode.
    has_breaks = re.search("[\x85\u2028\u2029]", text) is not None
    return yaml.safe_dump(values, sort_keys=False) if has_breaks else text
