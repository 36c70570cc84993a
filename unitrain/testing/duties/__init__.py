"""All duties of a backend, the simplest first: a backend that fails one will fail many of those after it."""

from importlib import import_module

from unitrain.testing.duty import Duty, registered

STARTS = (
    ("lifecycle", "verbs", "collectives"),
    ("parity",),
    ("gradients",),
    ("preparation",),
    ("failures",),
)
"""The modules, in order. The duties of a group of modules run in the same processes, one after another."""

for _modules in STARTS:
    for _module in _modules:
        import_module(f"{__name__}.{_module}")

DUTIES: dict[str, Duty] = registered()
