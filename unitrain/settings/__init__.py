"""Where a configuration's values come from, and what is said of a wrong one."""

from unitrain.settings.resolution import OTHER_VARIABLES, dump_yaml, parse_command_line, resolve_strategy

__all__ = ["OTHER_VARIABLES", "dump_yaml", "parse_command_line", "resolve_strategy"]
