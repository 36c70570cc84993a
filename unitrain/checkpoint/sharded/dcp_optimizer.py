"""The state of an optimizer by the names of its parameters, as torch's ``get_optimizer_state_dict`` returns it.

There are two forms: with parameter groups, which list their parameters; and flattened, with options for each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from unitrain.errors import CheckpointError

STATE, GROUPS, PARAMS = "state", "param_groups", "params"


def named(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the state of an optimizer with the names of its parameters in place of their numbers."""
    return {
        STATE: {names[number]: its for number, its in state[STATE].items()},
        GROUPS: [{**group, PARAMS: [names[number] for number in group[PARAMS]]} for group in state[GROUPS]],
    }


def flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return named state in torch's flattened form."""
    flat = {f"{STATE}.{name}.{key}": value for name, its in state[STATE].items() for key, value in its.items()}
    for group in state[GROUPS]:
        options = {key: value for key, value in group.items() if key != PARAMS}
        flat.update({f"{GROUPS}.{name}.{key}": value for name in group[PARAMS] for key, value in options.items()})
    return flat


class Numbered(NamedTuple):
    """The state of an optimizer as its ``state_dict`` has it, and the names of the parameters."""

    state: dict[str, Any]
    names: list[str]


def numbered(flat: Mapping[str, Any]) -> Numbered:
    """Return the state of an optimizer, of either form.

    Args:
        flat: the values by key, without the prefix of the optimizer.

    Raises:
        CheckpointError: the keys are of neither form.
    """
    groups = _listed(flat) if f"{GROUPS}.0.{PARAMS}" in flat else _by_options(flat)
    names = [name for group in groups for name in group[PARAMS]]
    numbers = {name: number for number, name in enumerate(names)}
    states: dict[int, dict[str, Any]] = {}
    for key, value in flat.items():
        if not key.startswith(f"{STATE}."):
            continue
        name = next(_beginnings(key.removeprefix(f"{STATE}."), numbers), None)
        if name is None:
            raise CheckpointError(f"the state {key!r} is of no parameter in the optimizer's groups.")
        states.setdefault(numbers[name], {})[key.removeprefix(f"{STATE}.{name}.")] = value
    count = iter(range(len(names)))
    with_numbers = [{**group, PARAMS: [next(count) for _ in group[PARAMS]]} for group in groups]
    return Numbered({STATE: states, GROUPS: with_numbers}, names)


def _beginnings(key: str, names: Mapping[str, int]) -> Any:
    """Yield the names that a key begins with, the longest first."""
    parts = key.split(".")
    return (name for end in range(len(parts) - 1, 0, -1) if (name := ".".join(parts[:end])) in names)


def _listed(flat: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the groups of the form that lists their parameters."""
    groups: list[dict[str, Any]] = []
    while f"{GROUPS}.{len(groups)}.{PARAMS}" in flat:
        prefix = f"{GROUPS}.{len(groups)}."
        groups.append({key.removeprefix(prefix): value for key, value in flat.items() if key.startswith(prefix)})
    return groups


def _by_options(flat: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return groups of the parameters with equal options, of the flattened form."""
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        if key.startswith(f"{GROUPS}."):
            name, _, option = key.removeprefix(f"{GROUPS}.").rpartition(".")
            options.setdefault(name, {})[option] = value
    groups: list[dict[str, Any]] = []
    for name, own in options.items():
        group = next((one for one in groups if {**one, PARAMS: None} == {**own, PARAMS: None}), None)
        if group is None:
            groups.append({**own, PARAMS: [name]})
        else:
            group[PARAMS].append(name)
    return groups
