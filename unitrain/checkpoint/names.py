"""The names of an optimizer's parameters in a checkpoint.

The state of an optimizer only numbers its parameters. A checkpoint has their names, so that state goes to the parameter
that it is of, and not to another of the same shape. torch.distributed.checkpoint (DCP) has names in place of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from torch import nn
from torch.optim import Optimizer

from unitrain.errors import CheckpointError

STATE, GROUPS, PARAMS = "state", "param_groups", "params"


def names_of(optimizer: Optimizer, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of an optimizer's parameters, in the order of its groups, as DCP has them.

    They are those in their model, if it is one model, and numbers if no module has one of them.
    """
    # Sorted, so that a parameter of two modules has the same name however a script orders them. By id, since Python
    # code computes the hash of a tensor.
    owned = {id(p): (name, key) for name in sorted(modules) for key, p in modules[name].named_parameters()}
    parameters = [id(parameter) for group in optimizer.param_groups for parameter in group[PARAMS]]
    if not owned.keys() >= set(parameters):
        return numbers_of(len(parameters))
    names = [owned[parameter] for parameter in parameters]
    one_owner = len({owner for owner, _ in names}) == 1
    return [key if one_owner else f"{owner}.{key}" for owner, key in names]


def numbers_of(parameters: int) -> list[str]:
    """Return the names of so many parameters that no module has."""
    return [str(number) for number in range(parameters)]


def numbers_before(
    optimizer: str, groups: Sequence[Mapping[str, Any]], saved: Sequence[str], now: Sequence[str]
) -> list[int]:
    """Return the number in a saved state of each parameter of this run, given their names then and now.

    Raises CheckpointError if a parameter group has other parameters.
    """
    order: list[int] = []
    for group in groups:
        numbers = {saved[number]: number for number in group[PARAMS]}
        for name in now[len(order) : len(order) + len(group[PARAMS])]:
            if name not in numbers:
                raise CheckpointError(
                    f"{optimizer} has {name} in this run, but not in the same parameter group of the checkpoint: give "
                    "the optimizer the same parameters. Nothing was loaded."
                )
            order.append(numbers[name])
    return order


def in_order(state: Mapping[str, Any], order: Sequence[int]) -> dict[str, Any]:
    """Return an optimizer's state, or its outline, with its parameters renumbered, given the number that each had."""
    numbered = count()
    groups = [{**group, PARAMS: [next(numbered) for _ in group[PARAMS]]} for group in state[GROUPS]]
    states = {now: state[STATE][then] for now, then in enumerate(order) if then in state[STATE]}
    return {**state, STATE: states, GROUPS: groups}


def named_state(state: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return an optimizer's state as DCP has it, by the names of parameters, without the parts of other ranks."""
    states = {keys[number]: values for number, values in state[STATE].items() if isinstance(values, dict)}
    groups = [{**group, PARAMS: [keys[number] for number in group[PARAMS]]} for group in state[GROUPS]]
    return {**state, STATE: states, GROUPS: groups}


def numbered_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state as ``state_dict`` has it, given it as DCP has it."""
    keys = [key for group in state[GROUPS] for key in group[PARAMS]]
    numbers = {key: number for number, key in enumerate(keys)}
    states = {numbers[key]: values for key, values in state.get(STATE, {}).items()}
    groups = [{**group, PARAMS: [numbers[key] for key in group[PARAMS]]} for group in state[GROUPS]]
    return {**state, STATE: states, GROUPS: groups}
