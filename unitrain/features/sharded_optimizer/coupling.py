"""Finds out whether an optimizer's update of a parameter depends on other parameters, which a rank may not own.

Optimizers that estimate one value for the whole model do (Prodigy, D-Adaptation), and those that clip by the norm of
all gradients. Two steps on small parameters show it.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain import rng
from unitrain.errors import UsageError

_STEPS = 2
_GROUPS = 8  # that are tried at most
_WIDTH = 4  # of a small parameter, in each dimension
_LR = 0.1
_PLAIN = (bool, int, float, str, type(None))


def refuse_coupled(optimizer: Optimizer) -> None:
    """Raise UsageError if an optimizer does not update each parameter by itself. It is not changed.

    One that can't be tried, since it fails on small parameters or draws random numbers, is not refused.
    """
    count = sum(len(_tried(group)) for group in optimizer.param_groups[:_GROUPS])
    generators = rng.capture()
    try:
        whole, again = (_stepped(optimizer, range(count), seed) for seed in (0, 1))
        if not _alike(whole, again):
            return
        parts = [_stepped(optimizer, range(start, count, 2), 0) for start in (0, 1)]
    except Exception:  # an optimizer may raise any exception
        return
    finally:
        rng.restore(generators)
    if not all(_alike(part, {name: whole[name] for name in part}) for part in parts):
        raise UsageError(
            f"shard_optimizer does not support {type(optimizer).__name__}, since its update of a parameter depends on "
            "others, which other ranks have. Set shard_optimizer to false, or use an optimizer such as AdamW or Muon."
        )


def _tried(group: dict[str, Any]) -> list[Parameter]:
    """Return the parameters of a group that small ones stand for."""
    parameters: list[Parameter] = group["params"]
    return parameters[:2]


def _stepped(optimizer: Optimizer, chosen: range, seed: int) -> dict[Any, Any]:
    """Make steps with a copy of an optimizer, and some of the small parameters.

    Return the parameters by number, and the options of the groups that have any.
    """
    torch.manual_seed(seed)
    groups: list[dict[str, Any]] = []
    found: dict[Any, Any] = {}
    number = 0
    for group in optimizer.param_groups[:_GROUPS]:
        parameters = []
        for p in _tried(group):
            if number in chosen:
                values = torch.randn(_small(p), generator=torch.Generator().manual_seed(number)).to(p.device, p.dtype)
                found[number] = Parameter(values)
                found[number].grad = values.flip(list(range(p.dim()))) * 10.0 ** (number % 4)
                parameters.append(found[number])
            number += 1
        options = copy.deepcopy({name: value for name, value in group.items() if name != "params"})
        if options.get("lr") is not None:
            options["lr"] = options["lr"] * 0 + _LR  # a scheduler may begin with 0
        groups.append({**options, "params": parameters})
    made: Optimizer = object.__new__(type(optimizer))
    vars(made).update({name: value for name, value in vars(optimizer).items() if isinstance(value, _PLAIN)})
    made.__setstate__({"defaults": optimizer.defaults, "state": defaultdict(dict), "param_groups": groups})
    for _ in range(_STEPS):
        made.step()
    for index, group in enumerate(groups):
        if group["params"]:
            found[f"options {index}"] = repr({name: value for name, value in group.items() if name != "params"})
    return found


def _small(parameter: Parameter) -> list[int]:
    return [min(_WIDTH, size) for size in parameter.shape]


def _alike(some: dict[Any, Any], others: dict[Any, Any]) -> bool:
    """Return whether two results are equal except for rounding."""
    return all(
        torch.allclose(value, others[name], rtol=1e-3, atol=1e-6)
        if isinstance(value, Tensor)
        else value == others[name]
        for name, value in some.items()
    )
