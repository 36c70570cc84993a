"""``unitrain.StrategyConfig``: ``StrategyConfig`` with the settings of features, and a section for each backend.

It is made once, when this module is imported. Type checkers don't know what is installed: they see the common fields,
and ``config.section(name, Settings)`` for a backend's.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import Field, create_model, model_validator
from typing_extensions import Unpack

from unitrain import config, features
from unitrain.communication.backend import backend_names, load_backend
from unitrain.config import Section
from unitrain.errors import BackendError
from unitrain.features.keywords import StrategySettings


def __getattr__(name: str) -> NoReturn:
    if name == "StrategyConfig":  # by a backend's module, which is being imported to make it
        raise ImportError("a backend's module must import StrategyConfig from unitrain.config")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _section_of(backend: str) -> tuple[type[Section], Any] | None:
    """Return a backend's section as a pydantic field, or None if the backend has no settings."""
    settings = load_backend(backend).Settings
    if not settings.model_fields:
        return None
    if backend in config.StrategyConfig.model_fields or hasattr(config.StrategyConfig, backend):
        raise ValueError(f"StrategyConfig already has an attribute {backend!r}")
    description = settings.__doc__ or f"Settings of the backend {backend}."
    return settings, Field(default=settings(), description=" ".join(description.split()))


def _sections() -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of the installed backends, and why others were left out."""
    fields: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for backend in backend_names():
        try:
            field = _section_of(backend)
        except BackendError as error:
            left_out[backend] = str(error)
        except Exception as error:  # a broken plug-in must not break runs that don't use it
            left_out[backend] = f"backend {backend!r} has no settings: {type(error).__name__}: {error}"
        else:
            if field is not None:
                fields[backend] = field
    return fields, left_out


_FIELDS, _LEFT_OUT = _sections()

if TYPE_CHECKING:

    class StrategyConfig(config.StrategyConfig):
        """The common fields, and a constructor that takes sections and settings of features as well."""

        def __init__(self, **settings: Unpack[StrategySettings]) -> None: ...

else:
    StrategyConfig = create_model(
        "StrategyConfig",
        __base__=(*features.settings(), config.StrategyConfig),  # pydantic puts the fields of the last one first
        __validators__={"refuse_exclusions": model_validator(mode="after")(features.refuse_exclusions)},
        __module__=__name__,  # so that it can be pickled
        # The descriptions are set already. Without this, pydantic searches source code for docstrings: 40 ms.
        __cls_kwargs__={"use_attribute_docstrings": False},
        __doc__="Settings of a training run: common ones, features, and a section for each installed backend.",
        **_FIELDS,
    )


def why_unknown(name: str) -> str:
    """Return a sentence that says why an unknown setting of a backend is not available, or an empty string.

    ``name`` is a flag, a variable or a dotted name.
    """
    words = re.split(r"\.|__", name.lstrip("-").replace("-", "_").removeprefix("UNITRAIN_").lower())
    return "".join(
        f" {reason[0].upper()}{reason[1:].rstrip('.')}." for word in words if (reason := _LEFT_OUT.get(word))
    )
