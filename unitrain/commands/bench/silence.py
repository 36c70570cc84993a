"""Backends that stop averaging gradients on request, to measure what communication costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from unitrain.communication.backend import Backend, Wait

_GRADIENTS = "gradients."
"""What the names of the core's all-reduces of gradients start with."""


class _Silenced:
    """Mixed into the class of a backend. Every other collective stays as it is."""

    silent = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _made.append(self)

    def arm(self: Any, sync: bool) -> None:
        super().arm(sync and not self.silent)  # type: ignore[misc]

    def watch_gradients(self: Any, parameters: Sequence[Parameter]) -> Callable[[bool], None] | None:
        finish = super().watch_gradients(parameters)  # type: ignore[misc]
        if finish is None:
            return None
        return lambda late: None if self.silent else finish(late)

    def all_reduce(self: Any, tensor: Tensor, op: str, name: str) -> Wait:
        if self.silent and name.startswith(_GRADIENTS):
            return lambda: None
        return super().all_reduce(tensor, op, name)  # type: ignore[misc, no-any-return]


def silenced(backend: type[Backend]) -> type[Backend]:
    """Return a subclass of a backend that ``silence`` has an effect on."""
    return type(backend.__name__, (_Silenced, backend), {})


_made: list[Any] = []  # in this process: one


def silence() -> None:
    """Let the backend average no gradients from now on. The ranks' weights diverge."""
    for backend in _made:
        backend.silent = True
        backend.arm(False)
