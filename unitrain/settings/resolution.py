"""Resolves a configuration from its sources.

In order of increasing precedence: defaults, a YAML file, the environment (strategy settings only), then the keyword
arguments of ``unitrain.init`` or the command line.
"""

from __future__ import annotations

import os
import reprlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

from unitrain.config import Section
from unitrain.config import StrategyConfig as CommonConfig
from unitrain.errors import ConfigError
from unitrain.job import excepthook
from unitrain.settings.command_line import read_command_line
from unitrain.settings.schema import did_you_mean, dotted, flag, groups_of, nested, variable
from unitrain.settings.sources import Source, validate
from unitrain.settings.strategy_config import StrategyConfig, why_unknown

RecipeModel = TypeVar("RecipeModel", bound=Section)
"""Settings of a recipe: its own, and a field ``strategy: unitrain.StrategyConfig = unitrain.StrategyConfig()``."""

OTHER_VARIABLES = {
    "UNITRAIN_LAUNCHER": "overrides the detected launcher",
    "UNITRAIN_JOB_SECRET": "proves to the other ranks that a process belongs to the job",
    "UNITRAIN_FAULT": "makes a rank fail, for tests",
    "UNITRAIN_CACHE": "folder for what UniTrain builds and keeps",
    "UNITRAIN_ELASTIC_FOLDER": "folder for what scripts for Horovod commit",
}
"""The UNITRAIN_ variables that are not settings, and their purpose."""


def resolve_strategy(
    config: CommonConfig | None, overrides: Mapping[str, object], environ: Mapping[str, str]
) -> StrategyConfig:
    """Return the configuration of ``unitrain.init(config, **overrides)``.

    Fields that were set explicitly on ``config`` take precedence over the environment, and ``overrides`` over both.
    Sections are merged field by field. A field that no source sets is not in the result's ``model_fields_set``.
    A section of ``overrides`` is a dict or a model.
    """
    if config is not None and not isinstance(config, CommonConfig):
        raise ConfigError(
            f"config must be a StrategyConfig, but is {reprlib.repr(config)}. Pass settings by name, as in "
            'unitrain.init(backend="ddp").'
        )
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
    """Return the configuration of a recipe from the command line, the environment and ``--config FILE``.

    The command line takes precedence over the environment, which takes precedence over the file. From here on,
    uncaught UniTrain errors end the process with a message and an exit code, as after ``unitrain.init``.

    Args:
        model: the recipe's settings. Only the strategy's are read from the environment.
        argv: the arguments, without the name of the program.
        prog: name of the program, for ``--help``.
        description: description of the program, for ``--help``.
    """
    excepthook.install_hook()
    config_file, flags = read_command_line(groups_of(model), argv, prog=prog, description=description)
    # What the default of a section sets holds where other sources set other fields of it.
    defaults = {name: field.default for name, field in model.model_fields.items()}
    sections = {name: _set_on(default) for name, default in defaults.items() if isinstance(default, BaseModel)}
    set_by_default = {name: fields for name, fields in sections.items() if fields}
    sources = [Source(flags, flag)]
    if environment := _read_environment(os.environ):
        # Variables leave out the section "strategy", the only one that they can set.
        sources.insert(0, Source({"strategy": environment}, lambda path: variable(list(path)[1:])))
    if config_file is not None:
        from unitrain.settings.yaml_file import read  # and yaml, which takes 10 ms

        sources.insert(0, Source(read(config_file), lambda path: f"{dotted(path)} ({config_file})"))
    return validate(model, [Source(set_by_default, dotted), *sources])


def dump_yaml(model: BaseModel) -> str:
    """Return a configuration as YAML. ``--config`` reads an equal configuration from it."""
    import yaml

    return yaml.safe_dump(model.model_dump(mode="json"), sort_keys=False)


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return a strategy's settings from the environment as nested strings. Warn about unknown variables."""
    given = {name: value for name, value in environ.items() if name.startswith("UNITRAIN_")}
    if given.keys() <= OTHER_VARIABLES.keys():
        return {}  # usually; the names of all settings take a while to collect
    known = {variable(setting.path): setting.path for group in groups_of(StrategyConfig) for setting in group.settings}
    for name in sorted(given.keys() - known.keys() - OTHER_VARIABLES.keys()):
        suggestion = why_unknown(name) or did_you_mean(name, sorted(known.keys() | OTHER_VARIABLES.keys()))
        # stacklevel 1: Python shows it once, though both the command line and init read the environment.
        warnings.warn(f"{name} is not an environment variable of UniTrain, and is ignored.{suggestion}", stacklevel=1)
    return nested({known[name]: value for name, value in given.items() if name in known})


def _set_on(config: BaseModel) -> dict[str, Any]:
    """Return the fields that were set explicitly on a model and its sections."""
    return config.model_dump(exclude_unset=True)


def _plain(name: str, value: object) -> object:
    """Return a keyword's value; for a section given as a model, the fields that were set on it."""
    field = StrategyConfig.model_fields.get(name)
    if isinstance(value, BaseModel) and field is not None and type(value) is field.annotation:
        return _set_on(value)
    return value
