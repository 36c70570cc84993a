"""Duties: what a backend owes its users, each a function that ranks run, and the worlds in which it is owed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from unitrain.testing.worlds import World

Needs = Callable[[World], bool]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Duty:
    """One duty of a backend."""

    name: str
    demand: str
    """What is owed, in a sentence."""
    module: str
    """The module that it is in, by the last part of its name."""
    function: Callable[..., Any]
    """What every rank does: raises where the duty is not done. What it returns may be judged."""
    arguments: tuple[Any, ...]
    """What the function, and the judge, is given after the world."""
    needs: Needs
    judge: Callable[..., None] | None
    """Given the world, the arguments, and what the ranks returned, in rank order; raises where that is wrong."""
    ending: str | None
    """Pattern of what the ranks say at their end, where the duty is to end the job. Nothing is done after it."""


def everywhere(world: World) -> bool:
    """Return that the duty is owed in every world."""
    return True


def several_processes(world: World) -> bool:
    """Return whether there is anybody to communicate with."""
    return world.processes > 1


def two_processes(world: World) -> bool:
    """Return whether there are two processes, for what more of them would only repeat."""
    return world.processes == 2


def matched_by_name(world: World) -> bool:
    """Return whether there are several processes, whose calls the backend matches by name."""
    return world.processes > 1 and world.kind.matches_by_name


def compresses(compression: str) -> Needs:
    """Return what tells whether there are several processes, whose gradients the backend can send so."""
    return lambda world: world.processes > 1 and compression in world.kind.compressions


_registered: dict[str, Duty] = {}


def duty(
    *,
    needs: Needs = everywhere,
    each: Mapping[str, Any] | None = None,
    judge: Callable[..., None] | None = None,
    ending: str | None = None,
) -> Callable[[Function], Function]:
    """Make a function of a world a duty. The first line of its docstring says what is owed.

    Args:
        needs: tells whether a world owes it.
        each: one duty for each of these values, by name; the function is given it after the world.
        judge: as in ``Duty``.
        ending: as in ``Duty``.
    """

    def register(function: Function) -> Function:
        [demand, *_] = inspect.getdoc(function).splitlines()  # type: ignore[union-attr]
        module = function.__module__.rpartition(".")[2]
        variants = {"": ()} if each is None else {f"[{name}]": (value,) for name, value in each.items()}
        for suffix, arguments in variants.items():
            name = function.__name__ + suffix
            assert name not in _registered, f"two duties are called {name}"
            _registered[name] = Duty(name, demand, module, function, arguments, needs, judge, ending)
        return function

    return register


def registered() -> dict[str, Duty]:
    """Return all duties by name, in the order in which they were made."""
    return dict(_registered)
