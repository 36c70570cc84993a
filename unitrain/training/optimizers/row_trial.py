"""Finds out, by steps on small tensors, whether an optimizer may step on some rows of its parameters.

It may if it updates every element by itself, as SGD and Adam do. An optimizer that looks at norms, at rows and columns
or at the whole model (LAMB, Adafactor, Muon, D-Adaptation) does not make the same step on some rows.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.communication.streaming import leaves
from unitrain.data.structure import rebuilt
from unitrain.errors import UsageError

Shape = tuple[int, ...]

_STEPS = 3
_LR = 0.1
_FIRST_ROWS = 48
_SCALES = (1.0, 30.0)  # of weights and gradients in the first rows and in the others, so that their norms differ
_NUMBERS = ("params", "param_names", "lr", "initial_lr", "weight_decay")
_HOOKS = tuple(name for name in Optimizer.__annotations__ if name.endswith("_hooks"))
_REPLACED = ("state", "param_groups", "step", *_HOOKS)  # a scheduler replaces the step of the instance


class _NotByRowsError(Exception):
    """Why an optimizer can't step on rows, as a clause."""


def shapes_of_common_state(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> set[Shape]:
    """Check that an optimizer may step on some rows of its parameters.

    Args:
        optimizer: the optimizer. It is not changed.
        groups: some of its parameter groups.

    Returns:
        The shapes of tensors in its state that don't have one element for each element of a parameter.

    Raises:
        UsageError: it may not.
    """
    chosen = _unlike(groups)
    try:
        whole = _Trial(optimizer, chosen)
        whole.run(None)
        common: set[Shape] = set()
        for part in range(len(_SCALES)):
            on_rows = _Trial(optimizer, chosen)
            on_rows.run(part)
            _compare_parameters(whole, on_rows, part)
            common.update(_compared_states(whole, on_rows, part))
        return common
    except _NotByRowsError as error:
        reason = str(error)
    except Exception as error:  # an optimizer may raise any exception
        reason = f"steps on small tensors, made to try it, fail with {type(error).__name__}: {error}"
    raise UsageError(
        f"shard_optimizer does not support {type(optimizer).__name__}, since {reason}. Set shard_optimizer to false, "
        "or use an optimizer that updates each element by itself, such as AdamW or SGD."
    )


def exchange(optimizer: Optimizer, others: Mapping[Any, Parameter]) -> None:
    """Give an optimizer other parameters in place of some of its own, with their state. Nothing is copied."""
    for group in optimizer.param_groups:
        group["params"] = [others.get(p, p) for p in group["params"]]
    state = [(others.get(p, p), its) for p, its in optimizer.state.items()]
    optimizer.state.clear()
    optimizer.state.update(state)


def mapped_state(state: Any, shape: Shape, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a parameter's state with ``change(tensor)`` in place of each tensor of the parameter's shape."""
    return rebuilt(state, lambda value: change(value) if _has_shape(value, shape) else value)


def _has_shape(value: object, shape: Shape) -> bool:
    return isinstance(value, Tensor) and bool(shape) and tuple(value.shape) == shape


def _unlike(groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return one of each set of groups that differ only in learning rates and weight decay."""
    found: dict[str, Mapping[str, Any]] = {}
    for group in groups:
        options = sorted((key, repr(value)) for key, value in group.items() if key not in _NUMBERS)
        found.setdefault(repr((options, sorted({p.dim() for p in group["params"]}))), group)
    return list(found.values())


class _Trial:
    """A copy of an optimizer with small parameters, which have the same values and gradients in every trial."""

    def __init__(self, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._used: list[Parameter] = []
        self._calls: list[str] = []
        nothing = Parameter(torch.empty(0))
        small: dict[int, Any] = {id(p): nothing for group in optimizer.param_groups for p in group["params"]}
        self.optimizer: Optimizer = object.__new__(type(optimizer))
        state: defaultdict[Any, Any] = defaultdict(dict)
        made = []
        for group in groups:
            by_dim: dict[int, Parameter] = {}
            for p in group["params"]:
                if p.dim() not in by_dim:
                    by_dim[p.dim()] = self._small(p)
                    if p in optimizer.state:
                        state[by_dim[p.dim()]] = _resized(optimizer.state[p], p, by_dim[p.dim()])
                small[id(p)] = by_dim[p.dim()]
            self._used += by_dim.values()
            options = copy.deepcopy({k: v for k, v in group.items() if k not in ("params", "param_names")}, small)
            if options.get("lr") is not None:
                options["lr"] = torch.full_like(options["lr"], _LR) if isinstance(options["lr"], Tensor) else _LR
            made.append({**options, "params": [*by_dim.values(), *map(self._small, by_dim.values())]})
        attributes = {name: value for name, value in vars(optimizer).items() if name not in _REPLACED}
        vars(self.optimizer).update(copy.deepcopy(attributes, small))
        vars(self.optimizer).update({name: OrderedDict() for name in _HOOKS}, param_groups=made, state=state)
        self.optimizer.register_state_dict_post_hook(lambda *_: self._calls.append("state_dict"))
        self.optimizer.register_load_state_dict_pre_hook(lambda *_: self._calls.append("load_state_dict"))
        self.parameters: list[Parameter] = [p for group in made for p in group["params"]]
        self.before: list[Tensor] = [p.detach().clone() for p in self.parameters]

    def _small(self, parameter: Parameter) -> Parameter:
        shape = (515,) if parameter.dim() == 1 else (130, 70, *[1] * parameter.dim())[: parameter.dim()]
        dtype = torch.float32 if parameter.dtype in (torch.bfloat16, torch.float16) else parameter.dtype
        return Parameter(self._values(torch.empty(shape, dtype=dtype, device=parameter.device)))

    def _values(self, like: Tensor) -> Tensor:
        """Return random numbers, of which those in the second part are larger."""
        values = torch.randn(like.shape, generator=self._generator, dtype=torch.float64)
        if values.dim():
            values[_FIRST_ROWS:] *= _SCALES[1]
        return values.to(like.device, like.dtype)

    def run(self, part: int | None) -> None:
        """Make the steps: on all rows, or on those of a part."""
        optimizer, rows = self.optimizer, {}
        if part is not None:
            rows = {p: Parameter(_rows(p.detach(), part)) for p in self.parameters if p.dim()}
            for p in rows.keys() & optimizer.state.keys():
                its, shape = optimizer.state[p], tuple(p.shape)
                optimizer.state[p] = mapped_state(its, shape, lambda value: _rows(value, part).clone())
        for _ in range(_STEPS):
            for p in self._used:
                gradient = self._values(p)
                target = rows.get(p, p)
                target.grad = gradient if target is p else _rows(gradient, part)
            exchange(optimizer, rows)
            optimizer.step()
            exchange(optimizer, {its: p for p, its in rows.items()})
        self.state: dict[str, Any] = optimizer.state_dict()
        optimizer.load_state_dict(self.state)
        if self._calls != ["state_dict", "load_state_dict"]:
            raise _NotByRowsError("its class replaces state_dict() or load_state_dict()")


def _resized(state: Any, parameter: Tensor, small: Tensor) -> Any:
    """Return a copy of a parameter's state for a small one."""

    def change(value: Tensor) -> Tensor:
        numbers = torch.arange(small.numel(), device=value.device) % max(1, value.numel())
        values = value.detach().reshape(-1)[numbers].reshape(small.shape)
        return values.to(small.dtype) if value.dtype == parameter.dtype else values

    return copy.deepcopy(mapped_state(state, tuple(parameter.shape), change))


def _rows(tensor: Tensor, part: int | None) -> Tensor:
    return tensor[_FIRST_ROWS:] if part else tensor[:_FIRST_ROWS]


def _compare_parameters(whole: _Trial, on_rows: _Trial, part: int) -> None:
    for p, its, before in zip(whole.parameters, on_rows.parameters, whole.before, strict=True):
        if (p.grad is None) != torch.equal(p, before):
            raise _NotByRowsError("it changes parameters without gradients" if p.grad is None else "it changes nothing")
        changes = [one.detach() - before for one in (p, its)]
        if not _alike(*([_rows(change, part) for change in changes] if p.dim() else changes)):
            raise _NotByRowsError("what it does with some rows of a parameter depends on the others")


def _compared_states(whole: _Trial, on_rows: _Trial, part: int) -> Iterator[Shape]:
    """Yield the shapes of what is not divided."""
    if repr(whole.state["param_groups"]) != repr(on_rows.state["param_groups"]):
        raise _NotByRowsError("the options of its groups depend on gradients")
    expected, found = (dict(leaves(trial.state["state"])) for trial in (whole, on_rows))
    for path, value in expected.items():
        shape = tuple(whole.parameters[path[0]].shape)
        divided = _has_shape(value, shape)
        other = found.get(path)
        same = _alike(_rows(value, part) if divided else value, other) if isinstance(value, Tensor) else value == other
        if not same:
            name = ".".join(map(str, path[1:]))
            raise _NotByRowsError(f"{name} in its state is not the same for some rows as for all")
        if isinstance(value, Tensor) and value.dim() and not divided:
            yield tuple(value.shape)


def _alike(expected: Tensor, found: object) -> bool:
    """Return whether two tensors are equal except for rounding."""
    if not isinstance(found, Tensor) or (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(expected, found)
    bound = math.sqrt(torch.finfo(expected.dtype).eps) * expected.abs().amax()
    return bool(((expected - found).abs() <= bound).all())
