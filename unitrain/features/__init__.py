"""Capabilities that the core does not name.

Each folder here is a feature, and is found by being there: delete it, and the rest works without it.

A feature's package declares what it is by these names, all optional. It imports what it is made of in ``make`` only, so
that settings are read without it.

- ``Settings``: a ``Section`` whose fields become fields of ``StrategyConfig``.
- ``SETTING``: the name of the setting that turns the feature on, by another value than its default. Without it, the
  feature is always on.
- ``EXCLUDES``: settings that it can't be combined with, and why.
- ``check(config, backend)``: raises ConfigError if it does not work with a backend. Called if the feature is turned on.
- ``before_joining(launch, backend)``: called before this process joins a job. Raises ConfigError if the feature, which
  has no setting then, does not work with this launcher and backend.
- ``VERIFIED``: arguments of ``unitrain.testing.parity.cases.Case``, to compare training with it with a plain loop.
- ``AS_ONE_DEVICE``: settings with which ranks compute what one device does for the same samples, where they would not
  without the feature.
- ``WRITERS``: by the ending of a file, functions ``(file, forms, tensors)`` that ``unitrain checkpoint merge`` calls to
  write tensors in a format of their own.
- ``make(config)``: returns the ``unitrain.Feature`` that is added to the run, if the feature is turned on.
- ``attach(checkpoint, sockets)``: adds hooks to a checkpoint that was opened. Called if the feature is turned on.

If it has a module ``command``, this is a command of ``unitrain``: ``NAME``, ``SUMMARY``, a clause for its help, and
``add_arguments(parser)``, as in ``unitrain.commands``.
A function that scripts call as ``unitrain.NAME`` is in a file ``NAME.py`` of the feature's folder.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from unitrain.config import Section, StrategyConfig, conflict

if TYPE_CHECKING:
    from unitrain.checkpoint import Checkpoint
    from unitrain.communication.backend import Backend
    from unitrain.launch.detect import Launch
    from unitrain.training.feature import Feature
    from unitrain.training.loop.sockets import Sockets


class Exclusion(NamedTuple):
    """A setting that a feature can't be combined with."""

    setting: str
    """Its name, with dots."""
    reason: str
    """Why, as a clause without a full stop."""
    values: tuple[object, ...] = ()
    """The values that are excluded; by default, all but the setting's default and those ``allowed``."""
    allowed: tuple[object, ...] = ()
    """Other values that are not excluded."""
    by: tuple[object, ...] = ()
    """The values of the feature's own setting that exclude it; by default, all that turn the feature on."""

    def excludes(self, value: object, default: object, own: object) -> bool:
        """Return whether a value of the setting is excluded, given its default and the feature's own setting."""
        if self.by and own not in self.by:
            return False
        return value in self.values if self.values else value not in (default, *self.allowed)


@cache
def modules() -> tuple[ModuleType, ...]:
    """Return the packages of all features, in alphabetical order."""
    return tuple(import_module(f"{__name__}.{name}") for name in _names())


def _names() -> list[str]:
    return [entry.name for entry in pkgutil.iter_modules(__path__) if entry.ispkg]


def commands() -> list[Any]:
    """Return the modules of commands that features add. Other features are not imported: most import torch."""
    having = [name for name in _names() if any(Path(folder, name, "command.py").exists() for folder in __path__)]
    return [import_module(f"{__name__}.{name}.command") for name in having]


def settings() -> list[type[Section]]:
    """Return the settings of all features."""
    return [module.Settings for module in modules() if hasattr(module, "Settings")]


def verified() -> list[dict[str, Any]]:
    """Return the arguments of the cases in which ``unitrain verify`` trains with features."""
    return [arguments for module in modules() for arguments in getattr(module, "VERIFIED", ())]


def declared(name: str) -> dict[str, Any]:
    """Return what all features declare by a name, in one dict.

    Args:
        name: of a dict in their packages: ``AS_ONE_DEVICE`` or ``WRITERS``.
    """
    return {key: value for module in modules() for key, value in getattr(module, name, {}).items()}


def refuse_exclusions(config: StrategyConfig) -> StrategyConfig:
    """Return the settings. Raise the error of a validator if a feature excludes one of them."""
    for module in _turned_on(config, having="EXCLUDES"):
        own, _ = _value_and_default(config, module.SETTING)
        for exclusion in module.EXCLUDES:
            if exclusion.excludes(*_value_and_default(config, exclusion.setting), own):
                raise conflict(module.SETTING, exclusion.setting, exclusion.reason)
    return config


def check(config: StrategyConfig, backend: type[Backend]) -> None:
    """Check that the features work with a backend that the settings turn on.

    Raises:
        ConfigError: one does not.
    """
    for module in _turned_on(config, having="check"):
        module.check(config, backend)


def before_joining(launch: Launch, backend: type[Backend]) -> None:
    """Let the features act that must, before this process joins a job.

    Raises:
        ConfigError: one does not work with this launcher and backend.
    """
    for module in modules():
        if hasattr(module, "before_joining"):
            module.before_joining(launch, backend)


def make(config: StrategyConfig) -> list[Feature]:
    """Return the features that the settings turn on."""
    return [module.make(config) for module in _turned_on(config, having="make")]


def attach(checkpoint: Checkpoint, sockets: Sockets) -> None:
    """Attach the features that the settings turn on to a checkpoint that was opened. Collective."""
    for module in _turned_on(sockets.config, having="attach"):
        module.attach(checkpoint, sockets)


def _turned_on(config: StrategyConfig, having: str) -> Iterator[Any]:
    """Yield the packages of the features that are turned on and declare a name."""
    for module in modules():
        if hasattr(module, having):
            value, default = _value_and_default(config, getattr(module, "SETTING", ""))
            if value != default or not hasattr(module, "SETTING"):
                yield module


def _value_and_default(config: BaseModel, name: str) -> tuple[object, object]:
    """Return a setting and its default, given its name with dots; None and None if there is no such setting."""
    *sections, last = name.split(".")
    for section in sections:
        config = getattr(config, section, None)  # type: ignore[assignment]
    fields: Mapping[str, Any] = {} if config is None else type(config).model_fields
    return (getattr(config, last), fields[last].default) if last in fields else (None, None)
