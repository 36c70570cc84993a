"""Backends by name, found through the entry-point group ``unitrain.backends``: built-in and third-party alike."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from unitrain.errors import BackendError, ConfigError, nearest

if TYPE_CHECKING:
    from unitrain.strategy import Strategy

GROUP = "unitrain.backends"


@cache  # 4 ms each time, and every backend is looked up when unitrain.StrategyConfig is made
def _found() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def backend_names() -> list[str]:
    """Return the names of the installed backends, sorted. Imports none of them."""
    return sorted(_found())


def load_backend(name: str) -> type[Strategy]:
    """Import the backend called ``name`` and return its class.

    Raises:
        ConfigError: no backend of that name is installed.
        BackendError: its distribution names something that is not a Strategy, or that can't be imported.
    """
    from unitrain.strategy import Strategy

    found = _found()
    if name not in found:
        raise ConfigError(
            f"backend {name!r} is not installed.{nearest(name, found)} "
            f"Installed: auto, {', '.join(sorted(found)) or 'none (reinstall unitrain: pip install -e .)'}."
        )
    try:
        backend = found[name].load()
    except (ImportError, AttributeError) as error:
        raise BackendError(f"backend {name!r} ({found[name].value}) can't be imported: {error}") from error
    if not (isinstance(backend, type) and issubclass(backend, Strategy)):
        raise BackendError(f"backend {name!r} names {found[name].value}, which is not a subclass of unitrain.Strategy.")
    return backend
