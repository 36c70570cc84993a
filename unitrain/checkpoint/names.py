"""The names of a run's state in a checkpoint.

The state of an optimizer only numbers its parameters. A checkpoint has their names, so that state goes to the parameter
that it is of, and not to another of the same shape. In the format of torch.distributed.checkpoint (DCP), values have
paths, such as ``("optimizer", "state", "layer.weight", "exp_avg")``, which are joined by dots to keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, pairwise
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from unitrain.errors import CheckpointError

STATE, GROUPS, PARAMS = "state", "param_groups", "params"
Name = list[str]  # the name of the object that has a parameter, and the parameter's name in the object
Keys = tuple[Any, ...]
"""The path of a value: the name of an object, and the keys and positions that lead to the value in its state."""


def names_of(optimizer: Optimizer, modules: Mapping[str, nn.Module]) -> list[Name] | None:
    """Return the names of an optimizer's parameters, in the order of its groups; None if no module has one of them."""
    # Sorted, so that a parameter of two modules has the same name however a script orders them.
    names = {p: [name, key] for name in sorted(modules) for key, p in modules[name].named_parameters()}
    of_groups = [names.get(parameter) for group in optimizer.param_groups for parameter in group[PARAMS]]
    return [name for name in of_groups if name is not None] if all(of_groups) else None


def keys_of(names: Sequence[Name] | None, parameters: int) -> list[str]:
    """Return how DCP names the parameters of an optimizer: as their model does, if it is one model; else by number."""
    if names is None:
        return [str(number) for number in range(parameters)]
    one_owner = len({owner for owner, _ in names}) == 1
    return [name if one_owner else f"{owner}.{name}" for owner, name in names]


def numbers_before(
    optimizer: str, groups: Sequence[Mapping[str, Any]], saved: Sequence[Any], now: Sequence[Any]
) -> list[int]:
    """Return the number in a saved state of each parameter of this run, given their names then and now.

    Raises CheckpointError if a parameter group has other parameters.
    """
    order: list[int] = []
    for group in groups:
        numbers = {_shown(saved[number]): number for number in group[PARAMS]}
        for name in map(_shown, now[len(order) : len(order) + len(group[PARAMS])]):
            if name not in numbers:
                raise CheckpointError(
                    f"{optimizer} has {name} in this run, but not in the same parameter group of the checkpoint: give "
                    "the optimizer the same parameters. Nothing was loaded."
                )
            order.append(numbers[name])
    return order


def _shown(name: str | Name) -> str:
    return name if isinstance(name, str) else ".".join(name)


def in_order(state: Mapping[str, Any], order: Sequence[int]) -> dict[str, Any]:
    """Return an optimizer's state, or its outline, with its parameters renumbered, given the number that each had."""
    numbered = count()
    groups = [{**group, PARAMS: [next(numbered) for _ in group[PARAMS]]} for group in state[GROUPS]]
    states = {now: state[STATE][then] for now, then in enumerate(order) if then in state[STATE]}
    return {**state, STATE: states, GROUPS: groups}


# ---------------------------------------------------------------------------------------------------- paths of values


def joined(path: Keys) -> str:
    """Return the key of a path."""
    return ".".join(map(str, path))


def optimizer_values(name: str, state: Mapping[str, Any], keys: Sequence[str]) -> Iterator[tuple[Keys, Any]]:
    """Yield the values in an optimizer's state with their paths, given how DCP names the parameters."""
    for number, values in state[STATE].items():
        if isinstance(values, dict):  # else another rank has it
            yield from _nested((name, STATE, keys[number]), values)
    for number, group in enumerate(state[GROUPS]):
        named = {**group, PARAMS: [keys[parameter] for parameter in group[PARAMS]]}
        yield from (((name, GROUPS, number, option), value) for option, value in named.items())
    yield from (((name, key), value) for key, value in state.items() if key not in (STATE, GROUPS))


def _nested(path: Keys, value: Any) -> Iterator[tuple[Keys, Any]]:
    if isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
        for key, item in value.items():
            yield from _nested((*path, key), item)
    elif isinstance(value, list) and any(isinstance(item, Tensor) for item in value):
        for number, item in enumerate(value):
            yield from _nested((*path, number), item)
    else:
        yield path, value


def flat_options(name: str, state: Mapping[str, Any], keys: Sequence[str]) -> Iterator[tuple[Keys, Keys]]:
    """Yield the paths that torch's flattened form gives an optimizer's options, one for each parameter.

    With each comes the path of the option in its parameter group.
    """
    for number, group in enumerate(state[GROUPS]):
        for option in group.keys() - {PARAMS}:
            for parameter in group[PARAMS]:
                yield (name, f"{GROUPS}.{keys[parameter]}.{option}"), (name, GROUPS, number, option)


def numbered(values: Mapping[Keys, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return an optimizer's state as ``state_dict`` has it, and DCP's names of its parameters, given values by path.

    Paths lack the optimizer's name. They are those of ``optimizer_values``; or of torch's flattened form, which has no
    groups but options of each parameter, and state by one string.
    """
    groups: list[dict[str, Any]] = []
    for path in sorted(path for path in values if path[0] == GROUPS):
        while len(groups) <= path[1]:
            groups.append({})
        groups[path[1]][path[2]] = values[path]
    groups = groups or _grouped(values)
    keys = [key for group in groups for key in group[PARAMS]]
    numbers = {key: number for number, key in enumerate(keys)}
    state: dict[str, Any] = {STATE: {}}
    for path, value in values.items():
        if path[0] == STATE:
            key, inner = path[1], path[2:]
        elif path[0].startswith(f"{STATE}."):
            key, inner = _split(path[0].removeprefix(f"{STATE}."), numbers)
        else:
            if path[0] != GROUPS and not path[0].startswith(f"{GROUPS}."):
                state[path[0]] = value
            continue
        if key not in numbers:
            raise CheckpointError(f"the state {joined(path)!r} is of no parameter in the optimizer's groups.")
        _set(state[STATE], (numbers[key], *inner), value)
    number = count()
    state[GROUPS] = [{**group, PARAMS: [next(number) for _ in group[PARAMS]]} for group in groups]
    return state, keys


def _grouped(values: Mapping[Keys, Any]) -> list[dict[str, Any]]:
    """Return groups of the parameters with equal options, of the flattened form."""
    options: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        if path[0].startswith(f"{GROUPS}."):
            key, _, option = path[0].removeprefix(f"{GROUPS}.").rpartition(".")
            options.setdefault(key, {})[option] = value
    groups: list[dict[str, Any]] = []
    for key, of_key in options.items():
        # One group for all parameters with these options, as there was most likely when they were saved.
        group = next((group for group in groups if {**group, PARAMS: None} == {**of_key, PARAMS: None}), None)
        if group is None:
            groups.append({**of_key, PARAMS: [key]})
        else:
            group[PARAMS].append(key)
    return groups


def _split(text: str, keys: Mapping[str, int]) -> tuple[str, Keys]:
    """Return the longest key that a text begins with, and the rest of the text."""
    parts = text.split(".")  # both keys and options may contain dots
    ends = (end for end in range(len(parts) - 1, 0, -1) if ".".join(parts[:end]) in keys)
    end = next(ends, len(parts))
    return ".".join(parts[:end]), (".".join(parts[end:]),)


def _set(container: Any, path: Keys, value: Any) -> None:
    """Set a value in nested dicts and lists, which are made on the way."""
    for key, following in pairwise(path):
        if isinstance(container, list) and len(container) <= key:
            container.extend([None] * (key + 1 - len(container)))
        made: Any = [] if isinstance(following, int) else {}
        if isinstance(container, dict):
            container = container.setdefault(key, made)
        else:
            container[key] = made if container[key] is None else container[key]
            container = container[key]
    if isinstance(container, list):
        container.extend([None] * (path[-1] + 1 - len(container)))
    container[path[-1]] = value
