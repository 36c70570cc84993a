"""``SchedulerPart``: a scheduler as a part of a checkpoint, which continues as saved or as the script has made it."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unitrain.checkpoint.objects import ObjectPart
from unitrain.communication.state_transfer import SentState

_NESTED = "_schedulers"
# What the schedulers of torch derive from their arguments, beside attributes that are named like these.
_DERIVED = ("total_size",)
_PROGRESS = "last_epoch"  # an argument of each scheduler, but the number of its steps


class SchedulerPart(ObjectPart):
    """The state of a scheduler of torch, and the options that it was made with."""

    def __init__(self, name: str, value: LRScheduler | ReduceLROnPlateau) -> None:
        super().__init__(name, value)
        self.optimizer: Optimizer = value.optimizer

    @property
    def class_name(self) -> str:
        """The name of the scheduler's class, and of those of the schedulers in it."""
        return _class_name(self._value)

    @property
    def follows_steps(self) -> bool:
        """Whether the state follows from the number of steps."""
        return not isinstance(self._value, ReduceLROnPlateau)

    def replaced_options(self, outline: Any) -> list[str]:
        """Return which options of the script's scheduler a saved state replaces, for a message."""
        options = _options(f"{self.name}'s ", self._value, self.state(), outline)
        return [f"{name} is {there!r}, not {here!r}" for name, here, there in options if here != there]

    def load_with_options(self, saved: SentState) -> None:
        """Step the scheduler that the script has made as often as the saved one. Collective."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else it warns that it never stepped
        for _ in range(_steps(saved.receive()) - _steps(self.state())):
            self._value.step()


def _class_name(scheduler: Any) -> str:
    nested = ", ".join(map(_class_name, getattr(scheduler, _NESTED, ())))
    return f"{type(scheduler).__name__}({nested})" if nested else type(scheduler).__name__


def _options(
    name: str, scheduler: Any, state: Mapping[str, Any], saved: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each option of a scheduler, and of those in it, with its value in a state and a saved one."""
    arguments = inspect.signature(type(scheduler)).parameters.keys() - {_PROGRESS}
    for key in sorted(state.keys() & saved.keys()):
        here, there = state[key], saved[key]
        if key == _NESTED:
            for number, nested in enumerate(zip(vars(scheduler)[_NESTED], here, there, strict=True)):
                yield from _options(f"{name}schedulers[{number}].", *nested)
        elif key in _DERIVED or {key, key.removeprefix("_"), key.removesuffix("s")} & arguments:
            if isinstance(here, Counter):
                here, there = sorted(here.elements()), sorted(Counter(there).elements())
            yield name + key.removeprefix("_"), here, there


def _steps(state: Mapping[str, Any]) -> int:
    """Return the number of a scheduler's steps, given its state."""
    return int(state[_PROGRESS]) if _PROGRESS in state else _steps(state[_NESTED][0])
