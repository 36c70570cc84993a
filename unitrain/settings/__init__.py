"""Reads settings from keywords, the command line, the environment and YAML files, and validates them."""

from unitrain.settings.resolution import OTHER_VARIABLES, dump_yaml, parse_command_line, resolve_strategy

__all__ = ["OTHER_VARIABLES", "dump_yaml", "parse_command_line", "resolve_strategy"]
