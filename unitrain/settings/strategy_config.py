"""``StrategyConfig`` with a section for every installed backend that has settings: ``unitrain.StrategyConfig``.

Made once, when this module is imported. Type checkers can't know what is installed: they see the common fields, and
``config.section(name, Settings)`` for a backend's own.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import Field, create_model
from typing_extensions import Unpack

from unitrain import config
from unitrain.backend import backend_names, load_backend
from unitrain.config import Section
from unitrain.errors import BackendError
from unitrain.settings.keywords import StrategySettings


def __getattr__(name: str) -> NoReturn:
    if name == "StrategyConfig":  # asked for by a backend's module, which is imported in order to make it
        raise ImportError("a backend's module imports StrategyConfig from unitrain.config")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _section_of(backend: str) -> tuple[type[Section], Any] | None:
    """Return a backend's section as a field, or None where the backend has no settings."""
    settings = load_backend(backend).Settings
    if not (isinstance(settings, type) and issubclass(settings, Section)):
        raise TypeError(f"its Settings is {settings!r}, but must be a subclass of unitrain.config.Section")
    if not settings.model_fields:
        return None
    for name, field in settings.model_fields.items():
        if field.is_required():
            raise ValueError(f"its setting {name!r} has no default")
    if backend in config.StrategyConfig.model_fields or hasattr(config.StrategyConfig, backend):
        raise ValueError(f"StrategyConfig has an attribute {backend!r} of its own")
    if not backend.isidentifier():
        raise ValueError("its name is not an identifier")
    description = settings.__doc__ or f"Settings of the backend {backend}."
    return settings, Field(default=settings(), description=" ".join(description.split()))


def _sections() -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields for the installed backends, and for those left out, why."""
    fields: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for backend in backend_names():
        try:
            field = _section_of(backend)
        except BackendError as error:
            left_out[backend] = str(error)
        except Exception as error:  # whatever a broken plug-in raises: runs that don't choose it must not end with it
            left_out[backend] = f"backend {backend!r} has no settings: {type(error).__name__}: {error}"
        else:
            if field is not None:
                fields[backend] = field
    return fields, left_out


_FIELDS, _LEFT_OUT = _sections()

if TYPE_CHECKING:

    class StrategyConfig(config.StrategyConfig):
        """The common fields, and a constructor that takes the sections too."""

        def __init__(self, **settings: Unpack[StrategySettings]) -> None: ...

else:
    StrategyConfig = create_model(
        "StrategyConfig",
        __base__=config.StrategyConfig,
        __module__=__name__,  # where pickle finds it
        # The descriptions are there already; pydantic would look for docstrings in the source of every caller: 40 ms.
        __cls_kwargs__={"use_attribute_docstrings": False},
        __doc__="How a training script runs: the settings of all backends, and a section for each installed one.",
        **_FIELDS,
    )


def why_unknown(name: str) -> str:
    """Return a sentence that says why a backend's settings are unknown here, or an empty string.

    Args:
        name: of an unknown setting, as a flag, a variable or dotted.
    """
    words = re.split(r"\.|__", name.lstrip("-").replace("-", "_").removeprefix("UNITRAIN_").lower())
    return "".join(
        f" {reason[0].upper()}{reason[1:].rstrip('.')}." for word in words if (reason := _LEFT_OUT.get(word))
    )
