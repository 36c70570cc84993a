"""The names of an optimizer's parameters, which its state only numbers.

A checkpoint has them, so that state goes to the parameter that it is of, and not to another of the same shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from torch import nn
from torch.optim import Optimizer

from unitrain.errors import CheckpointError

Name = list[str]
"""The name of the object that has a parameter, and the parameter's name in it."""


def names_of(optimizer: Optimizer, modules: Mapping[str, nn.Module]) -> list[Name] | None:
    """Return the names of an optimizer's parameters, in the order of its groups; None if no module has one of them.

    Args:
        optimizer: the optimizer.
        modules: the modules of the checkpoint, by name.
    """
    names = {p: [name, key] for name in sorted(modules) for key, p in modules[name].named_parameters()}
    found = [names.get(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    return [name for name in found if name is not None] if all(found) else None


def numbers_before(
    optimizer: str, groups: Sequence[Mapping[str, Any]], saved: Sequence[Name], own: Sequence[Name]
) -> list[int]:
    """Return the number in a saved state of each parameter of this run.

    Args:
        optimizer: its name.
        groups: the parameter groups of the state, with as many parameters as this run's.
        saved: the names of the parameters in the state.
        own: their names in this run.

    Raises:
        CheckpointError: a group has other parameters.
    """
    before: list[int] = []
    for group in groups:
        numbers = {tuple(saved[number]): number for number in group["params"]}
        for name in own[len(before) : len(before) + len(group["params"])]:
            if tuple(name) not in numbers:
                raise CheckpointError(
                    f"{optimizer} has {'.'.join(name)} in this run, but not in the same parameter group of the "
                    "checkpoint: give the optimizer the same parameters. Nothing was loaded."
                )
            before.append(numbers[tuple(name)])
    return before


def in_order(state: Mapping[str, Any], before: Sequence[int]) -> dict[str, Any]:
    """Return an optimizer's state with its parameters numbered in the order that they have in this run.

    Args:
        state: its state, or the outline of it.
        before: the number in it of each parameter of this run.
    """
    numbered = count()
    groups = [{**group, "params": [next(numbered) for _ in group["params"]]} for group in state["param_groups"]]
    states = {now: state["state"][then] for now, then in enumerate(before) if then in state["state"]}
    return {**state, "state": states, "param_groups": groups}


def path_in_order(path: tuple[Any, ...], before: Sequence[int]) -> tuple[Any, ...]:
    """Return the path of a value in a state that ``in_order`` has numbered, given that in the state before."""
    return (path[0], before.index(path[1]), *path[2:]) if path[0] == "state" else path
