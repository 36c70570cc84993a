"""The command line of a settings model: parser, help and error messages."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from typing import Any

from unitrain.errors import ConfigError
from unitrain.settings.schema import Group, Setting, did_you_mean, dotted, flag, nested
from unitrain.settings.strategy_config import why_unknown

_SOURCES = """\
A setting is taken from the first of these that sets it: the command line, an environment variable (for strategy
settings only: UNITRAIN_PRECISION for --strategy.precision, UNITRAIN_DDP__BUCKET_CAP_MB for
--strategy.ddp.bucket-cap-mb), the file given by --config, the default. --FLAG alone means true; null means no value."""


def read_command_line(
    groups: Sequence[Group], argv: Sequence[str], *, prog: str, description: str
) -> tuple[str | None, dict[str, Any]]:
    """Return the file given by ``--config``, and the settings given by flags as nested strings.

    ``--help`` prints and exits with 0. The ``--local-rank`` that ``torch.distributed.launch`` appends is ignored.
    """
    parser = _parser(groups, prog, description)
    settings = {setting.path: setting for group in groups for setting in group.settings}
    try:
        given, left_over = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        name = str(error.argument_name).partition("/")[0]
        allowed = [f" It must be {setting.allowed}." for path, setting in settings.items() if flag(path) == name]
        raise ConfigError(f"{name}: {error.message}.{''.join(allowed)}") from None
    _refuse_unknown([word for word in left_over if word != "--"], ["--config", *map(flag, settings)])
    written = vars(given)
    flags = {path: written[dotted(path)] for path in settings if dotted(path) in written}
    return written.get("_config"), nested(flags)


def _parser(groups: Sequence[Group], prog: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [--config FILE] [--FLAG VALUE ...]",
        description=description,
        epilog=_SOURCES,
        # An abbreviation would become ambiguous with the next setting of the same beginning.
        allow_abbrev=False,
        # An error becomes a ConfigError, with the allowed values; argparse would print it, and exit.
        exit_on_error=False,
        add_help=False,
        # A flag that is absent leaves the setting to the other sources.
        argument_default=argparse.SUPPRESS,
        # Each flag on its own line with its help below: the names are too long for two columns.
        formatter_class=lambda prog: argparse.HelpFormatter(
            prog, max_help_position=8, width=min(shutil.get_terminal_size().columns - 2, 118)
        ),
    )
    general = parser.add_argument_group("general")
    general.add_argument("-h", "--help", action="help", help="Show this message and exit.")
    general.add_argument("--config", dest="_config", metavar="FILE", help="Read settings from this YAML file.")
    parser.add_argument("--local-rank", "--local_rank", dest="_local_rank", help=argparse.SUPPRESS)
    for group in groups:
        title = dotted(group.path) or "settings"
        section = parser.add_argument_group(title, group.description or None)
        for setting in group.settings:
            section.add_argument(
                flag(setting.path),
                dest=dotted(setting.path),
                # A switch may stand without a value.
                nargs="?" if setting.is_switch else None,
                const="true" if setting.is_switch else None,
                metavar=f"{{{','.join(setting.choices)}}}" if setting.choices else "VALUE",
                help=_help(setting).replace("%", "%%"),
            )
    return parser


def _help(setting: Setting) -> str:
    default = "required" if setting.default is None else f"default: {setting.default or repr('')}"
    return f"{setting.description} [{default if setting.choices else f'{setting.allowed}; {default}'}]"


def _refuse_unknown(words: list[str], known: Sequence[str]) -> None:
    """Raise ConfigError for unknown flags and stray arguments. Words after an unknown flag count as its values."""
    names = [word.partition("=")[0] for word in words if word.startswith("-")]
    if names:
        raise ConfigError(
            "\n".join(f"{name} is not a flag.{why_unknown(name) or did_you_mean(name, known)}" for name in names)
        )
    if words:
        raise ConfigError(f"unexpected argument {words[0]!r}: settings are given as flags (--name value).")
