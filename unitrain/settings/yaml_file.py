"""Settings in a YAML file: read strictly, with the line of each key, and written."""

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
        name: The file's path, as the user wrote it.

    Raises:
        ConfigError: The file can't be read, is no UTF-8 text, no YAML or no mapping, has a key twice in one section,
            or a tag that would make an object.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.values: dict[str, Any]
        self.values, self._root = self._load(self._read())

    def name_of(self, path: Iterable[object]) -> str:
        """Return a setting's name with the file and, where the setting or a section around it is in it, the line."""
        path = tuple(path)
        node, line = self._root, None
        for part in path:
            # The last one counts: keys merged from an anchor stand before the section's own.
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
            raise ConfigError(f"--config {self._name} is not text (UTF-8), so no YAML file.") from None

    def _load(self, text: str) -> tuple[dict[str, Any], yaml.Node]:
        loader = None
        try:
            loader = _StrictLoader(text)
            root = loader.get_single_node()
            values = None if root is None else loader.construct_document(root)
        except yaml.MarkedYAMLError as error:
            line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
            reason = ": ".join(filter(None, (error.context, error.problem)))
            raise ConfigError(f"--config {self._name}{line}: not valid settings in YAML: {reason}.") from None
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"--config {self._name}: not valid settings in YAML: {reason}.") from None
        finally:
            if loader is not None:
                loader.dispose()
        if root is None or not isinstance(values, dict):
            found = "empty" if root is None else reprlib.repr(values)
            raise ConfigError(f"--config {self._name} must hold 'name: value' settings, but is {found}.")
        return values, root


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key given twice, of which yaml.SafeLoader silently takes the last, and a key that is no name."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # refused when it is constructed: lists and mappings are unhashable
            if key.tag not in (self.DEFAULT_SCALAR_TAG, "tag:yaml.org,2002:merge"):
                problem = f"the key {key.value!r} is not a name (quote it if it is meant to be one)"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            if key.value in first:
                problem = f"{key.value!r} is given twice, first in line {first[key.value]}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            first[key.value] = key.start_mark.line + 1
        return node


class _Dumper(yaml.SafeDumper):
    """Writes strings so that they are read back as they were."""


def _represent_string(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Escape Unicode's line breaks, which YAML takes for its own and PyYAML leaves in plain strings as they are."""
    style = '"' if re.search("[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _represent_string)


def dump(values: dict[str, Any]) -> str:
    """Return plain values as YAML that ``YamlFile`` reads back."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
