"""Refuses a forward that changes weights: they are whole copies, which are dropped after it, and the shards stay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from unitrain.errors import UsageError


class ForwardChanges:
    """Finds which of a unit's whole weights were changed between the hooks of a user's forward.

    Its hooks must run within the hooks of fully_shard, which gather the weights and drop them: create it just before.
    """

    def __init__(self, unit: nn.Module) -> None:
        self._weights: dict[str, Tensor] = {}
        self._before: list[tuple[int, int]] | None = None  # None outside a forward, and where one is compiled
        unit.register_forward_pre_hook(self._note)
        unit.register_forward_hook(self._check)

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Set what the unit gathers: names and whole parameters."""
        self._weights = dict(weights)

    def _state(self) -> list[tuple[int, int]]:
        # The version counts changes in place, and `weight.data = ...` changes where the values are.
        return [(weight._version, weight.data_ptr()) for weight in self._weights.values()]

    def _note(self, module: nn.Module, args: Any) -> None:
        self._before = None if torch.compiler.is_compiling() else self._state()

    def _check(self, module: nn.Module, args: Any, output: Any) -> None:
        before, self._before = self._before, None
        if before is None or torch.compiler.is_compiling() or before == (after := self._state()):
            return
        pairs = zip(self._weights, before, after, strict=True)
        # A call within this one, of a method that FSDP gathers the weights for, has dropped them at its end.
        changed = [name for name, old, new in pairs if old != new and self._weights[name].untyped_storage().nbytes()]
        if not changed:
            return
        raise UsageError(
            f"the forward of {type(module).__name__.removeprefix('FSDP')} changed {', '.join(changed[:3])}, but under "
            "fsdp it has a copy of the weights that is dropped afterwards, so the change would be lost: change the "
            "weights after strategy.step, under torch.no_grad(), where each rank changes its shard, or compute with a "
            "changed copy (weight = renorm(self.weight)), or use backend ddp."
        )
