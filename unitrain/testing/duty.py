"""``Duty``: one requirement of the contract of backends, as a function that all ranks of a world run."""

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
    """What is required, in one sentence."""
    module: str
    """Last part of the name of its module."""
    function: Callable[..., Any]
    """Called on every rank. Raises an error if the duty fails; its result is passed to ``judge``."""
    arguments: tuple[Any, ...]
    """Arguments of the function and of ``judge`` after the world."""
    needs: Needs
    judge: Callable[..., None] | None
    """Called with the world, the arguments, and the results in rank order. Raises AssertionError if they are wrong."""
    ending: str | None
    """For a duty that must end the job: a regular expression for the ranks' last messages."""


def everywhere(world: World) -> bool:
    """Return True: the duty applies in every world."""
    return True


def several_processes(world: World) -> bool:
    """Return whether the world has more than one process."""
    return world.processes > 1


def two_processes(world: World) -> bool:
    """Return whether the world has two processes, for duties that need not be repeated with more."""
    return world.processes == 2


def matched_by_name(world: World) -> bool:
    """Return whether the world has several processes and a backend that matches calls by name."""
    return world.processes > 1 and world.kind.matches_by_name


def compresses(compression: str) -> Needs:
    """Return a condition: several processes, and a backend that supports this compression of gradients."""
    return lambda world: world.processes > 1 and compression in world.kind.compressions


_registered: dict[str, Duty] = {}


def duty(
    *,
    needs: Needs = everywhere,
    each: Mapping[str, Any] | None = None,
    judge: Callable[..., None] | None = None,
    ending: str | None = None,
) -> Callable[[Function], Function]:
    """Register a function of a world as a duty. The first line of its docstring is the demand.

    Args:
        needs: returns whether the duty applies in a world.
        each: values by name; one duty is made for each, and the value passed to the function after the world.
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
    """Return all duties by name, in the order of their registration."""
    return dict(_registered)
