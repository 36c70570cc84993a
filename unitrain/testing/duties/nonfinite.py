"""Duties with losses and gradients that are NaN or infinite on one rank."""

from __future__ import annotations

import contextlib
import io
import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from unitrain import NonFiniteError, Stopped, Strategy
from unitrain.testing.duty import duty
from unitrain.testing.models import (
    Net,
    Twins,
    assert_bit_equal_on_all_ranks,
    flat,
    samples,
    sgd,
    step_by_hand,
    two_rows_each,
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


class _Uncertain(Net):
    """Kendall, Gal and Cipolla, "Multi-Task Learning Using Uncertainty to Weigh Losses" (CVPR 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        loss = mse_loss(super().forward(x), targets)
        return loss * torch.exp(-self.log_variance) + self.log_variance


@duty()
def a_stand_in_does_not_count(world: World) -> None:
    """The loss of a rank without samples does not count, nor its gradient, even if it is NaN."""
    with world.open(on_nonfinite="raise") as strategy:
        twins = Twins(strategy, _Uncertain)
        loader = strategy.dataloader(samples(5), global_batch_size=4)  # 4, then 1
        for inputs, targets in loader:
            loss = twins.prepared(inputs, targets)
            strategy.step(loss * math.nan if loader.stand_in else loss, twins.optimizer)
        for inputs, targets in DataLoader(samples(5), batch_size=4):
            step_by_hand(twins.expected(inputs, targets), twins.by_hand)
        twins.assert_same()


@duty()
def nan_of_a_rank_without_tokens_does_not_count(world: World) -> None:
    """The NaN loss of a rank without tokens has no effect if its weight is 0."""
    with world.open(on_nonfinite="raise") as strategy:
        twins = Twins(strategy)
        inputs, targets, mine = two_rows_each(strategy)
        tokens = torch.ones(len(inputs))
        if strategy.world_size > 1:
            tokens[-2:] = 0  # the last rank has none
        for _ in range(3):
            loss = _token_mean(twins.prepared(inputs[mine]), targets[mine], tokens[mine])
            strategy.step(loss, twins.optimizer, weight=tokens[mine].sum())
            step_by_hand(_token_mean(twins.expected(inputs), targets, tokens), twins.by_hand)
        twins.assert_same()


def _token_mean(out: Tensor, targets: Tensor, tokens: Tensor) -> Tensor:
    return ((out - targets).pow(2).mean(1) * tokens).sum() / tokens.sum()
