"""``Duty``: one requirement of the contract of backends, as a function that all ranks of a world run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from unitrain.testing.worlds import World

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Duty:
    """One duty of a backend."""

    name: str
    """The name of its function, with the variant in brackets."""
    demand: str
    """What is required, in one sentence."""
    module: str
    """Last part of the name of its module."""
    function: Callable[..., Any]
    """Called on every rank. Raises an error if the duty fails; its result is passed to ``judge``."""
    arguments: tuple[Any, ...]
    """Arguments of the function and of ``judge`` after the world."""
    needs: Callable[..., bool]
    """Called with the world and the arguments. Returns whether the duty applies."""
    judge: Callable[..., None] | None
    """Called with the world, the arguments, and the results in rank order. Raises AssertionError if they are wrong."""
    ending: str | None
    """For a duty that must end the job: a regular expression for the ranks' last messages."""


def everywhere(world: World, *_: object) -> bool:
    """Return True: the duty applies in every world."""
    return True


def several_processes(world: World, *_: object) -> bool:
    """Return whether the world has more than one process."""
    return world.processes > 1


_registered: dict[str, Duty] = {}


def duty(
    *,
    needs: Callable[..., bool] = everywhere,
    each: Mapping[str, Any] | None = None,
    judge: Callable[..., None] | None = None,
    ending: str | None = None,
) -> Callable[[Function], Function]:
    """Register a function of a world as a duty, or one for each value of ``each``, which is passed after the world.

    The first line of the function's docstring is the demand.

    Args:
        needs: as in ``Duty``.
        each: names and values of variants; None for a function that takes the world only.
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
