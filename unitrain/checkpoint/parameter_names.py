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


def in_order(optimizer: str, state: Mapping[str, Any], saved: Sequence[Name], own: Sequence[Name]) -> dict[str, Any]:
    """Return an optimizer's state with its parameters numbered in the order that they have in this run.

    Args:
        optimizer: its name.
        state: its state, or the outline of it, with parameter groups of as many parameters as this run's.
        saved: the names of the parameters in the state.
        own: their names in this run.

    Raises:
        CheckpointError: a group has other parameters.
    """
    groups: list[dict[str, Any]] = state["param_groups"]
    before: list[int] = []  # the number in the state of each parameter of this run
    for group in groups:
        numbers = {tuple(saved[number]): number for number in group["params"]}
        for name in own[len(before) : len(before) + len(group["params"])]:
            if tuple(name) not in numbers:
                raise CheckpointError(
                    f"{optimizer} has {'.'.join(name)} in this run, but not in the same parameter group of the "
                    "checkpoint: give the optimizer the same parameters. Nothing was loaded."
                )
            before.append(numbers[tuple(name)])
    numbered = count()
    return {
        **state,
        "state": {now: state["state"][then] for now, then in enumerate(before) if then in state["state"]},
        "param_groups": [{**group, "params": [next(numbered) for _ in group["params"]]} for group in groups],
    }
