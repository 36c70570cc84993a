"""Warnings about losses that were scaled by hand, or are means over part of their targets."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy as bce
from torch.nn.functional import cross_entropy, mse_loss

import unitrain
from unitrain.training.loop.loss_check import LossCheck

LABELS = torch.tensor([0, 1, 2, -100, 1])
LOGITS = torch.ones(5, 3)
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 3.0])


def logits() -> Tensor:
    return torch.arange(15.0).reshape(5, 3).requires_grad_()


def messages(loss: Tensor, *, accumulate: int = 1, world: int = 1, weighted: bool = False) -> list[str]:
    check = LossCheck(accumulate, world)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(3):
            if step >= check.next_step:
                check.look(loss, step, weighted=weighted)
    return [str(one.message) for one in seen]


@pytest.mark.parametrize(
    ("loss", "settings", "said"),
    [
        (lambda: logits().mean() / 4, {"accumulate": 4}, "divided by 4, the setting accumulate"),
        (lambda: logits().mean() / 3, {"world": 3}, "divided by 3, the number of processes"),
        (lambda: logits().mean() * torch.tensor(65536.0), {}, "multiplied by 65536, as by a GradScaler"),
        (lambda: torch.GradScaler("cpu").scale(logits().mean()), {}, "multiplied by 65536, as by a GradScaler"),
        (lambda: cross_entropy(logits(), LABELS), {"world": 2}, r"a mean over 4, .* 5 targets \(some have ignore_i"),
        (lambda: mse_loss(logits(), LOGITS, reduction="sum"), {"world": 2}, "a sum over samples .* Divide the loss by"),
        (lambda: bce(logits().sigmoid(), LOGITS, reduction="sum") + logits().sum(), {"accumulate": 2}, "a sum over"),
        (
            lambda: cross_entropy(logits(), LABELS.abs() % 3, CLASS_WEIGHTS),
            {"world": 2},
            r"a mean over 10, .* 5 targets \(classes have weights\)",
        ),
        (
            lambda: cross_entropy(logits().reshape(1, 3, 5), LABELS.reshape(1, 5)),
            {"world": 2},
            "mean over 4, where the batch has 5 targets",
        ),
    ],
)  # fmt: skip
def test_a_loss_that_trains_another_model_is_warned_of_once(loss: Any, settings: dict[str, Any], said: str) -> None:
    [message] = messages(loss(), **settings)
    assert re.search(said, message), message


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        (lambda: logits().mean() / 4, {}),
        (lambda: logits().mean() / 3, {"accumulate": 4, "world": 2}),
        (lambda: (logits().mean() + logits().sum()) / 4, {"accumulate": 4}),  # the mean of several losses
        (lambda: logits().mean() * 0.5, {"world": 2}),
        (lambda: logits().sum() / 4, {"accumulate": 4}),  # the mean over a batch of 4
        (lambda: mse_loss(logits(), logits().detach(), reduction="sum") / 2, {"world": 2}),
        (lambda: logits().mean() * torch.tensor(2.0, requires_grad=True), {"accumulate": 2}),
        (lambda: cross_entropy(logits(), LABELS), {}),
        (lambda: cross_entropy(logits(), LABELS), {"world": 2, "weighted": True}),
        (lambda: cross_entropy(logits(), LABELS, reduction="sum") / 5, {"world": 2}),
        (lambda: cross_entropy(logits(), LABELS.abs() % 3), {"world": 2, "accumulate": 2}),
        (lambda: mse_loss(logits(), logits().detach()), {"world": 2}),
        (lambda: logits().reshape(-1)[0], {"world": 2}),
        (lambda: mse_loss(logits(), LOGITS, reduction="sum"), {}),
        (lambda: mse_loss(logits(), LOGITS, reduction="sum"), {"world": 2, "weighted": True}),
        (lambda: mse_loss(logits(), LOGITS, reduction="sum") * 0.2, {"world": 2}),
        (lambda: mse_loss(logits()[:1], LOGITS[:1], reduction="sum"), {"world": 2}),  # of a single sample
    ],
)
def test_other_losses_are_not(loss: Any, settings: dict[str, Any]) -> None:
    assert messages(loss(), **settings) == []


def test_few_steps_are_looked_at() -> None:
    check = LossCheck(1, 2)
    steps = []
    for step in range(20):
        if step >= check.next_step:
            steps.append(step)
            check.look(logits().mean(), step, weighted=False)
    assert steps == [0, 1, 2, 4, 8, 16]


def train_with_ignored_targets() -> list[str]:
    with unitrain.init(backend="ddp") as strategy, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model, optimizer = strategy.prepare(model := nn.Linear(3, 3), torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            strategy.step(cross_entropy(model(torch.randn(5, 3)), LABELS), optimizer)
    return [f"{one.filename}: {one.message}" for one in seen]


def test_the_script_s_line_is_shown() -> None:
    (message,), others = run_ranks(train_with_ignored_targets)
    assert message.startswith(f"{__file__}: the loss is a mean over 4")
    assert others == []
