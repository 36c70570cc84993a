"""Losses and gradients that are not finite: the message, and what happens to the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from plain_loop import assert_equal, model_of, prepare_model, sgd, strategy_of, weights
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.data import DataLoader

import unitrain
from unitrain import NonFiniteError, Stopped, Strategy
from unitrain.testing.models import Net, Twins, samples, step_by_hand


def step_with(strategy: Strategy, factors: Sequence[float], **options: Any) -> tuple[nn.Module, list[Any]]:
    model, optimizer = prepare_model(strategy)
    x = torch.ones(2, 4, dtype=torch.float64)
    return model, [strategy.step(model(x).sum() * factor, optimizer) for factor in factors]


def test_a_run_that_is_stopped_says_which_setting_decides(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Stopped):
        step_with(strategy_of(), [1, 1, math.nan, 1])
    assert "on_nonfinite" in capsys.readouterr().out


def test_skipped_step_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with strategy_of(on_nonfinite="skip") as strategy:
        model, results = step_with(strategy, [1, math.nan, -math.inf, 1])
    assert [(r.stepped, r.skipped) for r in results] == [(True, False), (False, True), (False, True), (True, False)]
    expected, _ = step_with(strategy_of(), [1, 1])
    assert_equal(model, expected)
    assert capsys.readouterr().out.count("The step was skipped on all ranks.") == 2


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.1}, {"accumulate": 2}])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_nonfinite_gradient_of_a_finite_loss_is_caught(settings: dict[str, Any], bad: float) -> None:
    """An infinite gradient must not pass for a large one that clipping has tamed."""
    strategy = strategy_of(on_nonfinite="raise", **settings)
    model, optimizer = prepare_model(strategy)
    before = weights(model)
    model.get_parameter("2.bias").register_hook(lambda g: torch.full_like(g, bad))
    x = torch.ones(2, 4, dtype=torch.float64)
    said = r"a gradient of rank 0 \(the losses of all ranks were finite\); first affected parameter: 2.bias"
    with pytest.raises(NonFiniteError, match=said):  # noqa: PT012
        for _ in range(2 if settings.get("accumulate") else 1):
            strategy.step(model(x).sum(), optimizer)
    assert torch.equal(weights(model), before)


def test_a_sparse_gradient_that_is_not_finite_is_named() -> None:
    strategy = strategy_of(on_nonfinite="raise")
    model, optimizer = strategy.prepare(model := nn.Embedding(5, 3, sparse=True), SGD(model.parameters(), lr=0.1))
    model.get_parameter("weight").register_hook(lambda g: g * math.inf)  # type: ignore[no-untyped-call]
    with pytest.raises(NonFiniteError, match="first affected parameter: weight"):
        strategy.step(model(torch.tensor([1, 2])).sum(), optimizer)


def test_nonfinite_loss_in_the_midst_of_a_window_gives_up_the_window() -> None:
    with strategy_of(accumulate=3, on_nonfinite="skip") as strategy:
        model, results = step_with(strategy, [1, math.nan, 1, 1, 1, 1])
    assert [r.skipped for r in results] == [False, False, True, False, False, False]
    assert [r.stepped for r in results] == [False, False, False, False, False, True]
    expected, _ = step_with(strategy_of(), [1])
    assert_equal(model, expected)


def test_raised_nonfinite_step_leaves_nothing_for_the_next() -> None:
    strategy = strategy_of(on_nonfinite="raise")
    (one, first), (two, second) = prepare_model(strategy, 1), prepare_model(strategy, 2)
    x = torch.ones(1, 4, dtype=torch.float64)
    with pytest.raises(NonFiniteError):
        strategy.step((one(x) + two(x)).sum() * math.nan, [first, second])
    assert strategy.step((one(x) + two(x)).sum(), [first, second]).stepped
    expected = model_of(2)
    step_by_hand(expected(x).sum(), sgd(expected))
    assert_equal(two, expected)


class _Uncertain(Net):
    """Kendall, Gal and Cipolla, "Multi-Task Learning Using Uncertainty to Weigh Losses" (CVPR 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        loss = mse_loss(super().forward(x), targets)
        return loss * torch.exp(-self.log_variance) + self.log_variance


def train_with_stand_ins() -> None:
    """The loss of a rank without samples does not count, nor its gradient, even if it is NaN."""
    with unitrain.init(on_nonfinite="raise", precision="fp64", device="cpu", timeout_s=30) as strategy:
        twins = Twins(strategy, _Uncertain)
        loader = strategy.dataloader(samples(5), global_batch_size=4)  # 4, then 1
        for inputs, targets in loader:
            loss = twins.prepared(inputs, targets)
            strategy.step(loss * math.nan if loader.stand_in else loss, twins.optimizer)
        for inputs, targets in DataLoader(samples(5), batch_size=4):
            step_by_hand(twins.expected(inputs, targets), twins.by_hand)
        twins.assert_same()


@pytest.mark.parametrize("nprocs", [2, 3])
def test_a_stand_in_does_not_count(nprocs: int) -> None:
    run_ranks(train_with_stand_ins, nprocs=nprocs)
