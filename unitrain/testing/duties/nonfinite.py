"""Duties with losses and gradients that are NaN or infinite on one rank."""

from __future__ import annotations

import contextlib
import io
import math
from typing import Literal

import torch
from torch import Tensor, nn

from unitrain import NonFiniteError, Stopped, Strategy
from unitrain.testing.duty import duty
from unitrain.testing.models import (
    Net,
    assert_bit_equal_on_all_ranks,
    flat,
    sgd,
)
from unitrain.testing.worlds import World

_POISONS = ("loss", "labels", "gradient", "backward")


def _poisoned(out: Tensor, poison: str) -> Tensor:
    """Return a loss: finite, NaN, or NaN with gradients of 0, as if every label is ignored."""
    if poison == "loss":
        return out.sum() * math.nan
    return nn.functional.cross_entropy(out, torch.full((len(out),), -100 if poison == "labels" else 1))


class _Poisoned(Net):
    """A model that can get infinite gradients, in its last bias only or in all layers."""

    poison = ""

    def __init__(self) -> None:
        super().__init__()
        self.last.bias.register_hook(self._spoil)  # type: ignore[no-untyped-call]

    def _spoil(self, gradient: Tensor) -> Tensor:
        return gradient * math.inf if self.poison == "gradient" else gradient

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.poison == "backward":
            out.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call]
        return out


@duty(each={policy: policy for policy in ("stop", "skip", "raise")})
def not_finite(world: World, policy: Literal["stop", "skip", "raise"]) -> None:
    """If the last rank's values are not finite at step 3, all ranks apply on_nonfinite, and weights stay finite."""
    for poison in _POISONS:
        for debug in (False, True) if poison == "gradient" else (False,):
            with world.open(on_nonfinite=policy, debug=debug) as strategy:
                _meet(strategy, policy, poison)


def _whose(strategy: Strategy, poison: str, bad_rank: int) -> str:
    """Return what the message must say."""
    if poison in ("loss", "labels"):
        return f"the loss of rank {bad_rank}; first affected parameter: first.weight"
    # If only the parameter's own gradient is affected, it is checked after it was averaged, except with debug.
    known = poison == "backward" or strategy.config.debug or strategy.world_size == 1
    first = "first.weight" if poison == "backward" else "last.bias"
    return (
        f"a gradient{f' of rank {bad_rank}' if known else ''} (the losses of all ranks were finite); "
        f"first affected parameter: {first}"
    )


def _meet(strategy: Strategy, policy: str, poison: str) -> None:
    model = _Poisoned()
    prepared, optimizer = strategy.prepare(model, sgd(model))
    bad_rank = strategy.world_size - 1
    printed = io.StringIO()
    steps: list[bool] = []
    ended: BaseException | None = None
    for step in range(1, 6):
        before = flat(model)
        model.poison = poison if step == 3 and strategy.rank == bad_rank else ""
        loss = _poisoned(prepared(torch.ones(2, 4, dtype=torch.float64) * step), model.poison)
        try:
            with contextlib.redirect_stdout(printed):
                steps.append(strategy.step(loss, optimizer).stepped)
        except (Stopped, NonFiniteError) as error:
            ended = error
            assert torch.equal(flat(model), before), poison
            break
        assert flat(model).isfinite().all(), poison
        assert torch.equal(flat(model), before) != steps[-1], poison
    if policy == "skip":
        assert ended is None, poison
        assert steps == [True, True, False, True, True], poison
    else:
        assert steps == [True, True], poison
        assert type(ended) is (Stopped if policy == "stop" else NonFiniteError), poison
        assert not isinstance(ended, Stopped) or ended.code == 3
    said = str(ended) if policy == "raise" else printed.getvalue()
    if policy == "raise" or strategy.is_main:
        assert f"not finite at step 3: {_whose(strategy, poison, bad_rank)}." in said
    else:
        assert said == ""
    assert_bit_equal_on_all_ranks(strategy, model)
