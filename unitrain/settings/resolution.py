"""Where a configuration's values come from.

Sources, weakest first: defaults, a YAML file, the environment (a strategy's settings only), then the keyword arguments
of ``unitrain.init`` or the command line.
"""

from __future__ import annotations

import os
import reprlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from unitrain.config import Section
from unitrain.config import StrategyConfig as CommonConfig
from unitrain.errors import ConfigError, UsageError
from unitrain.job import excepthook
from unitrain.settings.command_line import read_command_line
from unitrain.settings.schema import did_you_mean, dotted, flag, groups_of, variable
from unitrain.settings.sources import Source, validate
from unitrain.settings.strategy_config import StrategyConfig, why_unknown
from unitrain.settings.yaml_file import YamlFile, dump

RecipeModel = TypeVar("RecipeModel", bound=Section)
"""A recipe's settings: its own, and a field ``strategy: unitrain.StrategyConfig = unitrain.StrategyConfig()``."""

OTHER_VARIABLES = {
    "UNITRAIN_LAUNCHER": "overrides which launcher is taken to have started the process",
    "UNITRAIN_FAULT": "makes a chosen rank fail, for tests",
    "UNITRAIN_CACHE": "folder for what UniTrain builds and keeps",
}
"""The UNITRAIN_ variables that are no setting, and what they do."""


def resolve_strategy(
    config: CommonConfig | None, overrides: Mapping[str, object], environ: Mapping[str, str]
) -> StrategyConfig:
    """Return the configuration that ``unitrain.init(config, **overrides)`` asks for.

    Of a complete ``config`` only the fields that were set on it outrank the environment; ``overrides`` outrank both.
    Sections merge field by field. A field that no source gave is not in the result's ``model_fields_set``.

    Args:
        config: A configuration, for example a recipe's.
        overrides: Settings by name; a section is a dict or a model.
        environ: The environment, of which the ``UNITRAIN_`` variables are read.

    Raises:
        ConfigError: A value is not allowed, a name unknown, or two settings exclude each other.
    """
    if config is not None and not isinstance(config, CommonConfig):
        raise ConfigError(f"config must be a StrategyConfig, but is {reprlib.repr(config)}.")
    keywords = {name: _plain(name, value) for name, value in overrides.items()}
    return validate(
        StrategyConfig,
        [
            Source(_read_environment(environ), variable),
            Source({} if config is None else _set_on(config), lambda path: f"config.{dotted(path)}"),
            Source(keywords, dotted),
        ],
    )


def parse_command_line(model: type[RecipeModel], argv: Sequence[str], *, prog: str, description: str) -> RecipeModel:
    """Return the configuration of a recipe: the command line over the environment over ``--config FILE``.

    From here on, an error that nobody catches ends as one message and an exit code, as after ``unitrain.init``.

    Args:
        model: The recipe's settings, of which only the strategy's are read from the environment.
        argv: The arguments, without the program's name.
        prog: The program's name, for ``--help``.
        description: What the program does, for ``--help``.

    Raises:
        ConfigError: A flag, a variable or the file is wrong; uncaught, the process ends with 2.
        UsageError: The model's strategy is a ``unitrain.config.StrategyConfig``, which has no backend's settings.
        SystemExit: After ``--help``, with 0.
    """
    excepthook.install_hook()
    for name, field in model.model_fields.items():
        if field.annotation is CommonConfig:
            raise UsageError(
                f"{model.__name__}.{name} is a unitrain.config.StrategyConfig, which has the common settings alone: "
                "annotate it with unitrain.StrategyConfig, which has every backend's."
            )
    config_file, flags = read_command_line(groups_of(model), argv, prog=prog, description=description)
    sources = [Source(flags, flag)]
    if environment := _read_environment(os.environ):
        sources.insert(0, Source({"strategy": environment}, lambda path: variable(list(path)[1:])))
    if config_file is not None:
        file = YamlFile(config_file)
        sources.insert(0, Source(file.values, file.name_of))
    return validate(model, sources)


def dump_yaml(model: BaseModel) -> str:
    """Return a configuration as YAML; given to ``--config``, it makes an equal one."""
    return dump(model.model_dump(mode="json"))


class _Environment(StrategyConfig, BaseSettings):
    """Tells pydantic-settings how a strategy's variables are named; never instantiated."""

    model_config = SettingsConfigDict(env_prefix="UNITRAIN_", env_nested_delimiter="__", enable_decoding=False)


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return a strategy's settings from the environment, nested and still as strings; warn of unknown variables."""
    known = {variable(setting.path) for group in groups_of(StrategyConfig) for setting in group.settings}
    for name in sorted(environ):
        if name.startswith("UNITRAIN_") and name not in known and name not in OTHER_VARIABLES:
            suggestion = why_unknown(name) or did_you_mean(name, sorted(known | set(OTHER_VARIABLES)))
            # At stacklevel 1 Python shows it once, though a recipe's command line and then init both read it.
            warnings.warn(f"{name} is not a variable of UniTrain and is ignored.{suggestion}", stacklevel=1)
    source = EnvSettingsSource(_Environment)
    source.env_vars = {name.lower(): value for name, value in environ.items() if name in known}
    return source()


def _set_on(config: BaseModel) -> dict[str, Any]:
    """Return the fields that were set on a model, in its sections too."""
    return config.model_dump(exclude_unset=True)


def _plain(name: str, value: object) -> object:
    """Return a keyword's value, a model of the section that the keyword names as the fields that were set on it."""
    field = StrategyConfig.model_fields.get(name)
    if isinstance(value, BaseModel) and field is not None and type(value) is field.annotation:
        return _set_on(value)
    return value
